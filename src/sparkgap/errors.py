"""Errors a user can cause or meet. Each message is one line that names the thing and the remedy."""


class SparkgapError(Exception):
    """Base of every error that is reported to a user as one line (CLI exit status 2, HTTP 4xx/5xx)."""


class ConfigError(SparkgapError, ValueError):
    """A setting or sampling parameter is out of its range."""


class ModelNotFoundError(SparkgapError):
    """A model name, path or source does not lead to a model."""


class DownloadError(SparkgapError):
    """A model could not be fetched, verified or stored."""


class CheckpointError(SparkgapError):
    """A model's files are damaged, incomplete or do not fit their own configuration."""


class UnsupportedModelError(SparkgapError):
    """A model is well formed and of a kind that this engine does not run."""


class PromptError(SparkgapError, ValueError):
    """A prompt is empty, too long, not valid text, or cannot be rendered by the chat template."""


class MissingBindingError(SparkgapError, LookupError):
    """A pass was asked for over tensors that no graph was captured over; the message has their binding."""


class OutputError(SparkgapError):
    """What was computed cannot be written to where it should go."""


class QueueFullError(SparkgapError):
    """As many requests wait as may; nothing of the new one was kept, and it may be given again later."""


class ServerError(SparkgapError):
    """A server that is to be measured does not answer, or not as it should."""


class EngineError(SparkgapError):
    """Computing a request failed; the message names the model. Other requests are not affected."""


class EngineDeadError(EngineError):
    """The engine stopped for good after a failure of its own; no request can be served any more."""


class EngineClosedError(EngineError):
    """The engine takes no new requests: it is being shut down."""
