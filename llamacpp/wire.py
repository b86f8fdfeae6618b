"""How a request is sent as a stream, and how the streamed answer becomes the one that was wanted whole.

Shapes read in tools/server/server-task.cpp (to_json_oaicompat_chat, to_json_oaicompat, to_json_non_oaicompat and their
partial and streamed forms) and server-context.cpp; equality is checked live in tests/llamacpp/test_wire.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from llamacpp.errors import EngineBroken
from llamacpp.reports import Json, Progress, Props, SlotFileReport, SlotReport, Timings, error_of

__all__ = [
    "Asked",
    "Decoder",
    "Json",
    "Kind",
    "Progress",
    "Props",
    "SlotFileReport",
    "SlotReport",
    "Timings",
    "assemble",
    "error_of",
    "is_unasked",
    "must_be_whole",
    "streamed",
]

Kind = Literal["chat", "completion", "native"]
"""Whose shapes: /v1/chat/completions, /v1/completions, /completion (and /infill)."""


# --- what to send, what to show -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """What the client's own body asked for, as far as the shape of the answer depends on it."""

    kind: Kind
    stream: bool
    progress: bool
    usage: bool
    return_tokens: bool
    response_fields: tuple[str, ...]

    @classmethod
    def of(cls, body: Json, kind: Kind) -> Asked:
        """`body`: the client's request, of any types; wrong ones are the engine's to refuse."""
        options, fields = body.get("stream_options"), body.get("response_fields")
        return cls(
            kind=kind,
            stream=body.get("stream") is True,
            progress=body.get("return_progress") is True,
            usage=isinstance(options, dict) and options.get("include_usage") is True,
            return_tokens=body.get("return_tokens") is True,
            response_fields=tuple(f for f in fields if isinstance(f, str)) if isinstance(fields, list) else (),
        )


def streamed(body: Json, kind: Kind) -> Json:
    """The body to send upstream for the client's `body`: a copy, streamed, with progress.

    Progress makes the engine notice soon that we left, and says the cache hit before the first token. For an answer
    wanted whole the usage is asked for (chat streams carry it only then; the other kinds always do) and
    `response_fields` is taken out (it would cut the last event only; `assemble` applies it). `echo`: a whole answer
    that continues an assistant message begins with that message's text, a stream only when asked (server-task.cpp,
    task_result_state).
    """
    sent = {**body, "stream": True, "return_progress": True}
    fields = body.get("response_fields")
    if body.get("stream") is True:
        if isinstance(fields, list):
            sent["response_fields"] = [*fields, "timings"]  # the last event, cut to these; we live on its figures
    else:
        sent.pop("response_fields", None)
        if kind == "chat":
            options = body.get("stream_options")
            sent["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
            sent["echo"] = True
    return sent


def must_be_whole(body: Json, kind: Kind) -> str | None:
    """Why a request wanted whole cannot be had equal from a stream and must be sent unstreamed; None when it can.

    Sources: server-common.cpp "logprobs is not supported with tools + stream"; server-task.cpp: a chat chunk without a
    new piece of message drops its logprobs, `__verbose` of a chat holds the raw text that no chunk has;
    server-context.cpp send_final_response: logprobs of a stop word are cut only unstreamed, process_token: a token
    that ends inside a UTF-8 character is not sent; server-schema.cpp: deepseek-legacy leaves the reasoning in the
    content only when streamed.

    Accepted: an answer cut by its length loses, streamed, the tail that the engine still holds back then: the
    beginning of a stop word, or of a character. Its cure would be requests that cannot be cancelled.
    """
    if body.get("verbose") is True:
        return "verbose"
    if kind == "chat" and body.get("logprobs"):
        return "logprobs"
    if kind == "chat" and body.get("reasoning_format") == "deepseek-legacy":
        return "reasoning_format deepseek-legacy"
    if body.get("stop") and (body.get("n_probs") or body.get("logprobs")):
        return "logprobs with stop words"
    if kind == "native" and body.get("return_tokens") is True:
        return "return_tokens"
    if kind == "native" and isinstance(prompts := body.get("prompt"), list) and not is_one_prompt(prompts):
        return "several prompts"
    return None


def is_one_prompt(prompts: list[Any]) -> bool:
    """Whether a `prompt` list is one prompt of tokens and texts: server-common.cpp, tokenize_input_prompts."""
    return len(prompts) == 1 or any(isinstance(part, int) for part in prompts)


def is_unasked(event: Json, asked: Asked) -> bool:
    """Whether a stream's event is there only because `streamed` asked for it, so that the client must not see it.

    Progress events bear no text, but for one case: continuing an assistant message with echo puts its text into the
    first of them; that one is shown.
    """
    if "prompt_progress" in event:
        return not asked.progress and not _bears_text(event)
    return "usage" in event and event.get("choices") == [] and asked.kind == "chat" and not asked.usage


def _bears_text(event: Json) -> bool:
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices:
        return bool(event.get("content"))
    choice = choices[0]
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(value for name, value in delta.items() if name != "role")
    return bool(choice.get("text"))


# --- a stream's events --------------------------------------------------------------------------------------------


class Decoder:
    """Reads one stream's events, already parsed, as they pass. Cheap: a few look-ups and list appends an event.

    `progress`, `timings`: the latest seen; `finish_reason`: of the first choice; `error`: the engine's error object
    when an event bore one; `n_events`: events that bore new text, reasoning or tool calls.
    """

    __slots__ = ("_choices", "_last", "_verbose", "error", "kind", "n_events", "progress", "timings", "usage")

    def __init__(self, kind: Kind) -> None:
        self.kind: Final = kind
        self.progress: Progress | None = None
        self.timings: Timings | None = None
        self.usage: Json | None = None
        self.error: Json | None = None
        self.n_events = 0
        self._choices: dict[int, _Choice] = {}
        self._last: Json | None = None
        self._verbose: Json | None = None

    def feed(self, event: Json) -> None:
        """`event`: the parsed `data:` of one event. Raises EngineBroken for one that no llama-server sends."""
        try:
            self._feed(event)
        except (AttributeError, TypeError, ValueError) as error:
            raise EngineBroken(
                "llama-server sent a stream event of an unknown shape; the request was ended. "
                "Check that the upstream URL leads to a llama-server of a supported version."
            ) from error

    def _feed(self, event: Json) -> None:
        if (failed := event.get("error")) is not None:
            self.error = failed if isinstance(failed, dict) else {"message": str(failed)}
            return
        if (progress := event.get("prompt_progress")) is not None:
            self.progress = Progress.from_json(progress) or self.progress
        if (timings := event.get("timings")) is not None:
            self.timings = Timings.from_json(timings) or self.timings
        if (usage := event.get("usage")) is not None:
            self.usage = usage if isinstance(usage, dict) else None
        if self.kind == "native":
            self._feed_native(event, progress is not None)
        else:
            self._last = event
            if (verbose := event.get("__verbose")) is not None:
                self._verbose = verbose
            for choice in event.get("choices") or ():
                self._feed_choice(choice, event)

    @property
    def text(self) -> str:
        """The first choice's content so far (of a chat: without reasoning and tool calls)."""
        return "".join(self._choices[0].text) if 0 in self._choices else ""

    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length`, `tool_calls`; of /completion `eos`, `word`, `limit`; None until the end."""
        return self._choices[0].finish_reason if 0 in self._choices else None

    @property
    def message(self) -> Json:
        """The first choice's message so far, as llama-server writes a whole one (chat)."""
        return (self._choices.get(0) or _Choice(0)).message()

    def whole(self, asked: Asked | None = None) -> Json:
        """The whole answer's JSON. Raises EngineRefused when the stream bore an error, EngineBroken without an end."""
        if self.error is not None:
            raise error_of({"error": self.error}) or EngineBroken("llama-server sent an empty error.")
        choices = [self._choices[index] for index in sorted(self._choices)]
        if not choices or any(choice.end is None for choice in choices):
            raise EngineBroken("llama-server's stream ended before the answer was complete; send the request again.")
        if self.kind == "native":
            return _whole_native(choices[0], asked)
        return self._whole_oai(choices)

    def _feed_native(self, event: Json, is_progress: bool) -> None:
        choice = self._choice(event.get("index"))
        if content := event.get("content"):
            choice.text.append(_text(content))
            self.n_events += 1
        if probabilities := event.get("completion_probabilities"):
            choice.logprobs.extend(probabilities)
        if event.get("stop") is True:
            choice.end = event
            choice.finish_reason = event.get("stop_type")
        elif not is_progress and (tokens := event.get("tokens")):
            choice.tokens.extend(tokens)

    def _feed_choice(self, got: Json, event: Json) -> None:
        choice = self._choice(got.get("index"))
        if (delta := got.get("delta")) is not None:
            self.n_events += choice.add(delta)
        elif text := got.get("text"):
            choice.text.append(_text(text))
            self.n_events += 1
        if logprobs := got.get("logprobs"):
            choice.logprobs.extend(logprobs.get("content") or ())
        if (reason := got.get("finish_reason")) is not None:
            choice.finish_reason = reason
            choice.end = event

    def _choice(self, index: object) -> _Choice:
        at = index if isinstance(index, int) else 0  # one choice needs no number
        if (found := self._choices.get(at)) is None:
            found = self._choices[at] = _Choice(at)
        return found

    def _whole_oai(self, choices: list[_Choice]) -> Json:
        end = choices[0].end or {}
        is_chat = self.kind == "chat"
        whole = {
            "choices": [choice.chat() if is_chat else choice.completion() for choice in choices],
            "created": end.get("created"),
            "model": end.get("model"),
            "system_fingerprint": end.get("system_fingerprint"),
            "object": "chat.completion" if is_chat else "text_completion",
            "usage": end.get("usage") or self.usage,
            "id": end.get("id"),
        }
        if (timings := end.get("timings") or (self._last or {}).get("timings")) is not None:
            whole["timings"] = timings
        if self._verbose is not None:
            # An engine started with --verbose adds it to all answers. Its raw text is in no event: content stands in.
            whole["__verbose"] = {**_unstreamed(self._verbose), "content": "".join(choices[0].text)}
        return whole


class _Choice:
    """What one choice of a stream has said so far."""

    __slots__ = ("end", "finish_reason", "index", "logprobs", "reasoning", "text", "tokens", "tools")

    def __init__(self, index: int) -> None:
        self.index = index
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.tools: dict[int, _Tool] = {}
        self.logprobs: list[Json] = []
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.end: Json | None = None

    def add(self, delta: Json) -> bool:
        """Takes a chat delta in; returns whether it bore anything."""
        bore = False
        if content := delta.get("content"):
            self.text.append(_text(content))
            bore = True
        if reasoning := delta.get("reasoning_content"):
            self.reasoning.append(_text(reasoning))
            bore = True
        for call in delta.get("tool_calls") or ():
            index = int(call.get("index", 0))
            if (tool := self.tools.get(index)) is None:
                tool = self.tools[index] = _Tool()
            tool.add(call)
            bore = True
        return bore

    def message(self) -> Json:
        """common/chat.cpp, common_chat_msg::to_json_oaicompat."""
        message: Json = {"role": "assistant", "content": "".join(self.text)}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.tools:
            message["tool_calls"] = [self.tools[index].whole() for index in sorted(self.tools)]
        return message

    def chat(self) -> Json:
        choice = {"finish_reason": self.finish_reason, "index": self.index, "message": self.message()}
        if self.logprobs:
            choice["logprobs"] = {"content": self.logprobs}
        return choice

    def completion(self) -> Json:
        logprobs = {"content": self.logprobs} if self.logprobs else None
        return {
            "text": "".join(self.text),
            "index": self.index,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
        }


class _Tool:
    """One tool call: id and name come whole (a name may come again, longer), arguments in pieces."""

    __slots__ = ("arguments", "id", "name")

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self.arguments: list[str] = []

    def add(self, call: Json) -> None:
        self.id = _text(call.get("id") or self.id)
        function = call.get("function") or {}
        self.name = _text(function.get("name") or self.name)
        if arguments := function.get("arguments"):
            self.arguments.append(_text(arguments))

    def whole(self) -> Json:
        call: Json = {"type": "function", "function": {"name": self.name, "arguments": "".join(self.arguments)}}
        if self.id:
            call["id"] = self.id
        return call


def assemble(kind: Kind, events: list[Json], asked: Asked | None = None) -> Json:
    """The JSON that the engine would have answered whole, from all events of the stream (`[DONE]` left out).

    `asked` matters to /completion only (`return_tokens`, `response_fields`). Raises like `Decoder.whole`.
    """
    decoder = Decoder(kind)
    for event in events:
        decoder.feed(event)
    return decoder.whole(asked)


def _whole_native(choice: _Choice, asked: Asked | None) -> Json:
    whole = dict(choice.end or {})
    whole["content"] = "".join(choice.text)
    whole["tokens"] = choice.tokens if asked is not None and asked.return_tokens else []
    whole = _unstreamed(whole)
    if choice.logprobs:
        whole["completion_probabilities"] = choice.logprobs
    return _picked(whole, asked.response_fields) if asked is not None and asked.response_fields else whole


def _unstreamed(whole: Json) -> Json:
    """With the settings as they are of an answer that is not streamed."""
    settings = whole.get("generation_settings")
    return {**whole, "generation_settings": {**settings, "stream": False}} if isinstance(settings, dict) else whole


def _picked(whole: Json, paths: tuple[str, ...]) -> Json:
    """server-common.cpp, json_get_nested_values: `a/b` is looked up step by step and kept under the name `a/b`."""
    picked: Json = {}
    for path in paths:
        current: Any = whole
        for step in path.split("/"):
            current = current.get(step, _MISSING) if isinstance(current, dict) else _MISSING
        if current is not _MISSING:
            picked[path] = current
    return picked


_MISSING: Final = object()


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("text expected")
    return value
