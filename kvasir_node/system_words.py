"""What the system says of an error, for a person: without its number, with the file where it names one.

Python begins such a sentence with `[Errno 104]`, which helps nobody who reads a status or a refusal.
"""

from __future__ import annotations

import os


def in_words(error: BaseException) -> str:
    """One sentence; of an error that says nothing, its kind. What is no `OSError` speaks for itself."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    path = error.filename
    return error.strerror if path is None else f"{os.fsdecode(path)}: {error.strerror}"
