"""Options that several commands share. Each group is a dataclass that becomes options of a command by being the
type of one of its parameters; names are vLLM's where vLLM has them."""

import functools
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, TypeAlias, get_type_hints

import typer

from sparkgap.config import (
    CONTEXT_GRAPHS,
    DEFAULT_MODEL,
    DTYPES,
    GRAPHS,
    QUANTIZATIONS,
    TASK_PIPELINES,
    EngineConfig,
    SamplingParams,
    SpeculativeConfig,
)
from sparkgap.errors import ConfigError

DEFAULT_MAX_TOKENS = 512
"""Output tokens of one answer unless `--max-tokens` says otherwise."""

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str, name: str = "kv-cache-memory") -> int:
    """A size such as `512M`, `2G`, `1.5GiB` or `1048576`, in bytes; units are powers of 1024.

    Args:
        text: the size.
        name: of the option, for the message.

    Raises:
        ConfigError: not a size, or less than one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].lower()]) if match and len(match[1]) < 20 else 0
    if size < 1:
        raise ConfigError(f"{name} must be a size such as 512M or 2G, got {text!r}")
    return size


def parse_logit_bias(entries: list[str] | None) -> dict[int, float] | None:
    """`ID=VALUE` entries as a map; None when there are none.

    Raises:
        ConfigError: an entry is not of that form.
    """
    bias: dict[int, float] = {}
    for entry in entries or ():
        token_id, _, value = entry.partition("=")
        try:
            bias[int(token_id)] = float(value)
        except ValueError:
            raise ConfigError(f"logit-bias must be ID=VALUE such as 42=-5, got {entry!r}") from None
    return bias or None


def parse_speculative_config(text: str) -> dict[str, Any]:
    """A JSON object with the keys of `SpeculativeConfig`.

    Raises:
        ConfigError: not a JSON object.
    """
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"speculative-config must be a JSON object, and is not valid JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"speculative-config must be a JSON object, got {text}")
    return settings


def _engine(*names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Model and engine", **settings)


def _sampling(*names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Sampling", **settings)


@dataclass(frozen=True)
class EngineOptions:
    """Which model is run, and how."""

    model: Annotated[
        str, _engine("--model", "-m", help="Catalog name, model directory, .gguf file or hf:owner/name.")
    ] = DEFAULT_MODEL
    dtype: Annotated[str, _engine("--dtype", help=f"One of {', '.join(DTYPES)}.")] = "auto"
    quantization: Annotated[
        str, _engine("--quantization", help=f"One of {', '.join(QUANTIZATIONS)}; auto: w8a8 on the CPU.")
    ] = "auto"
    device: Annotated[str, _engine("--device", help="auto, cpu, or an accelerator such as cuda.")] = "auto"
    max_model_len: Annotated[
        int | None, _engine("--max-model-len", help="Most tokens of prompt and answer; default: the model's own.")
    ] = None
    max_num_seqs: Annotated[int, _engine("--max-num-seqs", help="Most sequences decoded together.")] = (
        EngineConfig.max_num_seqs
    )
    kv_cache_memory: Annotated[
        str | None, _engine("--kv-cache-memory", metavar="SIZE", help="KV cache size, such as 512M or 2G.")
    ] = None
    seed: Annotated[int, _engine("--seed", help="Source of all random numbers.")] = 0
    threads: Annotated[
        int | None, _engine("--threads", help="Compute threads; default: the cores this process may use.")
    ] = None
    speculative_config: Annotated[
        str | None,
        _engine(
            "--speculative-config",
            metavar="JSON",
            help="""Speculation as JSON with vLLM's keys, such as '{"method": "ngram"}', which needs no drafter, or
            '{"method": "mtp"}', which takes the shipped MTP drafter.""",
        ),
    ] = None
    draft: Annotated[
        str | None,
        _engine("--draft", metavar="MODEL", help="Drafter directory or hf:owner/name; default: the shipped one."),
    ] = None
    num_speculative_tokens: Annotated[
        int | None, _engine("--num-speculative-tokens", help="Draft tokens a round; default: the drafter's own.")
    ] = None
    no_speculation: Annotated[bool, _engine("--no-speculation", help="Decode without a drafter.")] = False
    graphs: Annotated[
        str, _engine("--graphs", help=f"Replay captured passes: {', '.join(GRAPHS)}; auto: on for the CPU.")
    ] = "auto"
    context_graph: Annotated[
        str, _engine("--context-graph", help=f"Context update of a round: {', '.join(CONTEXT_GRAPHS)}; auto: masked.")
    ] = "auto"
    task_pipeline: Annotated[
        str,
        _engine(
            "--task-pipeline", help=f"Chain rounds on the device: {', '.join(TASK_PIPELINES)}; auto: where it can."
        ),
    ] = "auto"
    offline: Annotated[bool, _engine("--offline", help="Never download a model.")] = False

    def config(self) -> EngineConfig:
        """The engine's configuration. Raises ConfigError."""
        return EngineConfig(
            model=self.model,
            dtype=self.dtype,
            quantization=self.quantization,
            device=self.device,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            kv_cache_memory_bytes=None if self.kv_cache_memory is None else parse_bytes(self.kv_cache_memory),
            seed=self.seed,
            threads=self.threads,
            speculation=not self.no_speculation,
            speculative_config=self._speculative_config(),
            graphs=self.graphs,
            task_pipeline=self.task_pipeline,
            context_graph=self.context_graph,
            allow_download=not self.offline,
        )

    def _speculative_config(self) -> SpeculativeConfig | None:
        """`--speculative-config` with what the short options say; they win over the same key in the JSON."""
        settings = {} if self.speculative_config is None else parse_speculative_config(self.speculative_config)
        short = {"model": self.draft, "num_speculative_tokens": self.num_speculative_tokens}
        settings |= {name: value for name, value in short.items() if value is not None}
        if settings and self.no_speculation:
            raise ConfigError("--no-speculation contradicts the other options of speculation; use one of them")
        if settings or self.speculative_config is not None:
            return SpeculativeConfig.from_mapping(settings)
        return None


ModelArgument: TypeAlias = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
]
"""A model that is named without `--model`, as vLLM's and Ollama's users do."""


def with_model_argument(context: typer.Context, engine: EngineOptions, model: str | None) -> EngineOptions:
    """`engine` with the model that was named without `--model`, if one was.

    It wins over the environment and the file, as every option of the command line does.

    Raises:
        ConfigError: `--model` names another one.
    """
    if model is None or model == engine.model:
        return engine
    source = context.get_parameter_source("model")
    if source is not None and source.name == "COMMANDLINE":
        raise ConfigError(f"two models are named, {model} and --model {engine.model}; leave one out")
    return replace(engine, model=model)


MaxTokens: TypeAlias = Annotated[int, _sampling("--max-tokens", help="Most tokens of an answer.")]
"""For groups of options with another default."""


@dataclass(frozen=True)
class SamplingOptions:
    """How an answer's tokens are chosen and when it ends."""

    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS
    min_tokens: Annotated[int, _sampling("--min-tokens", help="Fewest tokens before an answer may end.")] = 0
    temperature: Annotated[float, _sampling("--temperature", help="0 takes the most probable token (greedy).")] = 0.0
    top_p: Annotated[float, _sampling("--top-p", help="Sample from the tokens that make up this probability.")] = 1.0
    top_k: Annotated[int, _sampling("--top-k", help="Sample from this many most probable tokens; 0: all.")] = 0
    min_p: Annotated[
        float, _sampling("--min-p", help="Drop tokens below this share of the most probable one's probability.")
    ] = 0.0
    presence_penalty: Annotated[
        float, _sampling("--presence-penalty", help="Subtracted from logits of tokens in the answer.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _sampling("--frequency-penalty", help="The same, times the token's count in the answer.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, _sampling("--repetition-penalty", help="Divides logits of tokens in prompt and answer.")
    ] = 1.0
    logit_bias: Annotated[
        list[str] | None,
        _sampling("--logit-bias", metavar="ID=VALUE", help="Added to a token's logit. May be repeated."),
    ] = None
    stop: Annotated[
        list[str] | None, _sampling("--stop", metavar="TEXT", help="End at this text. May be repeated.")
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        _sampling("--stop-token-ids", metavar="ID", help="End at this token. May be repeated."),
    ] = None
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="Go on after the model's end token.")] = False
    deadline: Annotated[
        float | None,
        _sampling("--deadline", metavar="SECONDS", help="End an answer then, with what it has."),
    ] = None

    def params(self, *, n: int = 1, logprobs: int | None = None) -> SamplingParams:
        """Sampling parameters, for commands that offer them with `n` and `logprobs`. Raises ConfigError."""
        return SamplingParams(
            n=n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=parse_logit_bias(self.logit_bias),
            deadline_s=self.deadline,
        )


def with_option_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command` with each parameter whose type is an option group replaced by the group's own options.

    A parameter of the command's own takes the place of a group's option of the same name, whose field then has its
    default.
    """
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command).parameters
    own = {name for name in signature if not is_dataclass(hints[name])}
    for parameter in signature.values():
        hint = hints[parameter.name]
        if is_dataclass(hint) and isinstance(hint, type):
            groups[parameter.name] = hint
            parameters += [option for option in _group_parameters(hint) if option.name not in own]
        else:
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        built = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group) if field.name not in own})
            for name, group in groups.items()
        }
        return command(**values, **built)

    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    return run


def _group_parameters(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(group)
    ]
