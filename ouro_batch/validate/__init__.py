"""What ``ouro-batch validate`` checks, and the independent arithmetic that it checks against."""
