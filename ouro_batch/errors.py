"""The errors this package raises on purpose: each names the thing, the value and the way out."""


class OuroBatchError(Exception):
    """Base of every error that is meant to be read by the user."""


class ModelError(OuroBatchError):
    """A checkpoint, tokenizer or chat template that is missing, broken or not supported."""


class EngineError(OuroBatchError):
    """The engine cannot run with the given device, memory or options."""


class RequestError(OuroBatchError, ValueError):
    """One request that cannot be run; others are not affected.

    ``type`` is the short machine-readable kind that ends up in an error record.
    """

    def __init__(self, message: str, type: str = "invalid_request"):
        super().__init__(message)
        self.type = type
