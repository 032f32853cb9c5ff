"""How long work reports itself: the catalog knows bytes, its caller knows how to draw them."""

from typing import Protocol


class ProgressReporter(Protocol):
    """Receives the progress of one download at a time. Calls come from one thread."""

    def start(self, description: str, total_bytes: int | None) -> None:
        """A transfer begins; `total_bytes` is None while its size is unknown."""
        ...

    def update(self, done_bytes: int) -> None:
        """Bytes of the current transfer that are on disk so far (not the increment)."""
        ...

    def finish(self) -> None:
        """The current transfer ended, well or not."""
        ...

    def log(self, message: str) -> None:
        """One line worth telling a user, such as a source that did not answer."""
        ...


class NullProgress:
    """A ProgressReporter that says nothing."""

    def start(self, description: str, total_bytes: int | None) -> None:
        """Ignore."""

    def update(self, done_bytes: int) -> None:
        """Ignore."""

    def finish(self) -> None:
        """Ignore."""

    def log(self, message: str) -> None:
        """Ignore."""
