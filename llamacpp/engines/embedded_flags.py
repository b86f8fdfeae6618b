"""The flags that the embedded engine takes, in llama-server's spellings, as settings of xllamacpp's CommonParams.

Values are what common/arg.cpp sets for the same flag. Enumerations are llama.h's and common.h's numbers (xllamacpp
2026.10.11549 takes plain integers for them). Standard library only: the child process imports this too.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from llamacpp.engines.flags import EngineSpec, Flag, Given, UsageError, merge, our_flags, parse_extra, parse_ours

Settings = dict[str, object]
Setter = Callable[[str], Settings]

# ggml_type of ggml.h; the ones that common/arg.cpp allows for a KV cache.
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "iq4_nl": 20, "q5_0": 6, "q5_1": 7}
REASONING_FORMATS = {"none": 0, "auto": 1, "deepseek-legacy": 2, "deepseek": 3}
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
ROPE_SCALING = {"none": 0, "linear": 1, "yarn": 2}
POOLING = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}
SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
REASONING = {"auto": -1, "off": 0, "on": 1}
# common_speculative_type; those that need a draft context of another kind than -md's are left out.
SPEC_TYPES = {"none": 0, "draft-simple": 1, "ngram-simple": 6, "ngram-map-k": 7, "ngram-map-k4v": 8, "ngram-mod": 9}
DRAFT_SIMPLE = SPEC_TYPES["draft-simple"]
VERBOSE = 2**31 - 1  # INT_MAX, as `--verbose` sets it


def _is(name: str, value: object) -> Setter:
    return lambda _: {name: value}


def _int(*names: str) -> Setter:
    return lambda text: dict.fromkeys(names, int(text))


def _float(name: str) -> Setter:
    return lambda text: {name: float(text)}


def _text(name: str) -> Setter:
    return lambda text: {name: text}


def _one_of(name: str, choices: Mapping[str, int]) -> Setter:
    def setter(text: str) -> Settings:
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return {name: choices[text]}

    return setter


def _file(name: str) -> Setter:
    def setter(text: str) -> Settings:
        if not Path(text).is_file():
            raise ValueError("a file that exists")
        return {name: str(Path(text).absolute())}

    return setter


def _template_file(text: str) -> Settings:
    try:
        return {"chat_template": Path(text).read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError("a readable text file") from error


def _template_arguments(text: str) -> Settings:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError("a JSON object")
    return {TEMPLATE_ARGUMENTS: {key: json.dumps(item) for key, item in value.items()}}


def _gpu_layers(text: str) -> Settings:
    return {"n_gpu_layers": {"auto": -1, "all": -2}[text] if text in ("auto", "all") else int(text)}


def _draft_model(text: str) -> Settings:
    return _file("speculative.draft.mparams.path")(text) | {"speculative.types": [DRAFT_SIMPLE]}


def _spec_types(text: str) -> Settings:
    return {"speculative.types": [_one_of("type", SPEC_TYPES)(name)["type"] for name in text.split(",")]}


def _aliases(text: str) -> Settings:
    return {"model_alias": [name.strip() for name in text.split(",") if name.strip()]}


TEMPLATE_ARGUMENTS = "default_template_kwargs"
THREADS = "cpuparams.n_threads"
THREADS_BATCH = "cpuparams_batch.n_threads"

# spellings -> (number of values, what they set, what the negative spelling sets)
_TABLE: tuple[tuple[str, Setter | None, Setter | None], ...] = (
    ("-m --model", _file("model.path"), None),
    ("-a --alias", _aliases, None),
    ("-c --ctx-size", _int("n_ctx"), None),
    ("-np --parallel", _int("n_parallel"), None),
    ("-b --batch-size", _int("n_batch"), None),
    ("-ub --ubatch-size", _int("n_ubatch"), None),
    ("-t --threads", _int(THREADS), None),
    ("-tb --threads-batch", _int(THREADS_BATCH), None),
    ("--threads-http", _int("n_threads_http"), None),
    ("--poll", _int("cpuparams.poll", "cpuparams_batch.poll"), None),
    ("-n --predict --n-predict", _int("n_predict"), None),
    ("-ngl --gpu-layers --n-gpu-layers", _gpu_layers, None),
    ("-sm --split-mode", _one_of("split_mode", SPLIT_MODES), None),
    ("-mg --main-gpu", _int("main_gpu"), None),
    ("-fa --flash-attn", _one_of("flash_attn_type", FLASH_ATTN), None),
    ("-ctk --cache-type-k", _one_of("cache_type_k", KV_TYPES), None),
    ("-ctv --cache-type-v", _one_of("cache_type_v", KV_TYPES), None),
    ("--rope-scaling", _one_of("rope_scaling_type", ROPE_SCALING), None),
    ("--rope-freq-base", _float("rope_freq_base"), None),
    ("--rope-freq-scale", _float("rope_freq_scale"), None),
    ("--rope-scale", lambda text: {"rope_freq_scale": 1.0 / float(text)}, None),
    ("--yarn-orig-ctx", _int("yarn_orig_ctx"), None),
    ("--yarn-ext-factor", _float("yarn_ext_factor"), None),
    ("--yarn-attn-factor", _float("yarn_attn_factor"), None),
    ("--yarn-beta-slow", _float("yarn_beta_slow"), None),
    ("--yarn-beta-fast", _float("yarn_beta_fast"), None),
    ("--pooling", _one_of("pooling_type", POOLING), None),
    ("--chat-template", _text("chat_template"), None),
    ("--chat-template-file", _template_file, None),
    ("--chat-template-kwargs", _template_arguments, None),
    ("--reasoning-format", _one_of("reasoning_format", REASONING_FORMATS), None),
    ("-rea --reasoning", _one_of("enable_reasoning", REASONING), None),
    ("--reasoning-budget", _int("sampling.reasoning_budget_tokens"), None),
    ("-ctxcp --ctx-checkpoints --swa-checkpoints", _int("n_ctx_checkpoints"), None),
    ("-cms --checkpoint-min-step", _int("checkpoint_min_step"), None),
    ("-cram --cache-ram", _int("cache_ram_mib"), None),
    ("--cache-reuse", _int("n_cache_reuse"), None),
    ("-sps --slot-prompt-similarity", _float("slot_prompt_similarity"), None),
    ("--sleep-idle-seconds", _int("sleep_idle_seconds"), None),
    ("--sse-ping-interval", _int("sse_ping_interval"), None),
    ("-to --timeout", _int("timeout_read", "timeout_write"), None),
    ("-lv --verbosity --log-verbosity", _int("verbosity"), None),
    ("-mm --mmproj", _file("mmproj.path"), None),
    ("-md --model-draft --spec-draft-model", _draft_model, None),
    ("--spec-type", _spec_types, None),
    ("--spec-draft-n-max", _int("speculative.draft.n_max"), None),
    ("--spec-draft-n-min", _int("speculative.draft.n_min"), None),
    ("--spec-draft-p-min --draft-p-min", _float("speculative.draft.p_min"), None),
    ("-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl", _int("speculative.draft.n_gpu_layers"), None),
    ("-s --seed", lambda text: {"sampling.seed": int(text) % 2**32}, None),
    ("--temp --temperature", _float("sampling.temp"), None),
    ("--top-k", _int("sampling.top_k"), None),
    ("--top-p", _float("sampling.top_p"), None),
    ("--min-p", _float("sampling.min_p"), None),
    ("--repeat-penalty", _float("sampling.penalty_repeat"), None),
    ("--repeat-last-n", _int("sampling.penalty_last_n"), None),
    ("--presence-penalty", _float("sampling.penalty_present"), None),
    ("--frequency-penalty", _float("sampling.penalty_freq"), None),
    ("--host", lambda text: {"hostnames": [text]}, None),
    ("--port", _int("port"), None),
    ("--slot-save-path", lambda text: {"slot_save_path": text.rstrip("/") + "/"}, None),
    ("--cors-origins", _text("cors_origins"), None),
    # Switches: no value. The second column is the positive spelling, the third the `--no-` one.
    ("--swa-full", _is("swa_full", True), None),
    ("-v --verbose --log-verbose", _is("verbosity", VERBOSE), None),
    ("--metrics", _is("endpoint_metrics", True), None),
    ("--props", _is("endpoint_props", True), None),
    ("--check-tensors", _is("check_tensors", True), None),
    ("--ignore-eos", _is("sampling.ignore_eos", True), None),
    ("-sp --special", _is("special", True), None),
    ("--embedding --embeddings", _is("embedding", True), None),
    ("--slots --no-slots", _is("endpoint_slots", True), _is("endpoint_slots", False)),
    ("--jinja --no-jinja", _is("use_jinja", True), _is("use_jinja", False)),
    ("--ui --webui --no-ui --no-webui", _is("ui", True), _is("ui", False)),
    ("--warmup --no-warmup", _is("warmup", True), _is("warmup", False)),
    ("--cache-prompt --no-cache-prompt", _is("cache_prompt", True), _is("cache_prompt", False)),
    ("--context-shift --no-context-shift", _is("ctx_shift", True), _is("ctx_shift", False)),
    ("-kvu --kv-unified -no-kvu --no-kv-unified", _is("kv_unified", True), _is("kv_unified", False)),
    ("-kvo --kv-offload -nkvo --no-kv-offload", _is("no_kv_offload", False), _is("no_kv_offload", True)),
    ("--cache-idle-slots --no-cache-idle-slots", _is("cache_idle_slots", True), _is("cache_idle_slots", False)),
    ("-cb --cont-batching -nocb --no-cont-batching", _is("cont_batching", True), _is("cont_batching", False)),
    ("--cors-credentials --no-cors-credentials", _is("cors_credentials", True), _is("cors_credentials", False)),
    ("--prefill-assistant --no-prefill-assistant", _is("prefill_assistant", True), _is("prefill_assistant", False)),
)
_FIRST_SWITCH = next(i for i, row in enumerate(_TABLE) if row[0] == "--swa-full")
_SHORT_NEGATIVES = frozenset({"-no-kvu", "-nkvo", "-nocb"})


def _is_negative(name: str) -> bool:
    return name.startswith("--no-") or name in _SHORT_NEGATIVES


def _build() -> tuple[dict[str, Flag], dict[str, Setter]]:
    grammar: dict[str, Flag] = {}
    setters: dict[str, Setter] = {}
    for i, (spellings, positive, negative) in enumerate(_TABLE):
        flag = Flag(tuple(spellings.split()), 1 if i < _FIRST_SWITCH else 0)
        for name in flag.names:
            grammar[name] = flag
            setter = negative if _is_negative(name) else positive
            assert setter is not None, name
            setters[name] = setter
    return grammar, setters


GRAMMAR, _SETTERS = _build()

WHO = "The embedded engine"


def params_for_embedded(spec: EngineSpec, port: int) -> Settings:
    """Dotted names of CommonParams -> plain values (JSON can carry them); the key is not among them (environment).

    Raises UsageError for a flag that the embedded engine does not take, or a value that does not fit.
    """
    extra = parse_extra(spec.extra, GRAMMAR, WHO)
    settings: Settings = {}
    for given in merge(parse_ours(our_flags(spec, port), GRAMMAR), extra):
        settings.update(_settings(given))
    # As common/arg.cpp does after parsing: the batch threads are the threads unless said otherwise, and templates that
    # can keep the reasoning of earlier turns do.
    theirs = settings.get(TEMPLATE_ARGUMENTS)
    settings[TEMPLATE_ARGUMENTS] = {"preserve_reasoning": "true", **(theirs if isinstance(theirs, dict) else {})}
    if THREADS in settings:
        settings.setdefault(THREADS_BATCH, settings[THREADS])
    return settings


def _settings(given: Given) -> Settings:
    value = given.values[0] if given.values else ""
    try:
        return _SETTERS[given.spelling](value)
    except (ValueError, ZeroDivisionError) as error:
        wanted = str(error) if str(error).startswith(("one of", "a ")) else "a number"
        raise UsageError(f"{given.spelling} {value!r}: {WHO.lower()} needs {wanted} here.") from error
