"""What came back from jobs: numbers out of their records, for the terminal and as one page."""
