"""A scripted llama-server: honest prefix counts, and on cue what a real one will not do when asked.

    async with FakeLlama(n_slots=2) as fake:
        fake.cues.append(Cue(hold_before=asyncio.Event()))   # the next model request hangs in its prefill
        ...
        await fake.arrived(1)                                # one model request has come
        await fake.abandoned(1)                              # one was left by its client

One token per word, mark or special token, so counts can be predicted by hand (`tokens_of`). Events, errors and slot
file answers have the shapes of llama-server b11549 (recorded 2026-11-30); seconds in `timings` are made up.
"""

import asyncio
import re
import zlib
from array import array
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from tests.fakes.http import Answer, Broken, Request, Server
from tests.fakes.run import Cue, Run, Slot, render
from tests.fakes.slot_bytes import attention_state, slot_file

_PIECE = re.compile(r"<\|\w+\|>|\s?\w+|\s|[^\w\s]")
_PLAIN = re.compile(r"\s?\w+|\s|[^\w\s]")
MODEL_DOORS = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/completions": "completion",
    "/completions": "native",
    "/completion": "native",
    "/infill": "native",
}


class FakeLlama:
    """The server. Everything it saw is in `requests`; `model_requests` are those that take a slot."""

    piece, plain = _PIECE, _PLAIN  # what is a token, with and without special ones

    def __init__(
        self,
        n_slots: int = 2,
        n_ctx: int = 8192,
        *,
        slot_dir: Path | None = None,
        api_key: str | None = None,
        slots_endpoint: bool = True,
        metrics_endpoint: bool = True,
        alias: str = "fake",
        port: int = 0,
    ) -> None:
        self.slots = [Slot() for _ in range(n_slots)]
        self.n_ctx, self.slot_dir, self.api_key, self.alias = n_ctx, slot_dir, api_key, alias
        self.slots_endpoint, self.metrics_endpoint = slots_endpoint, metrics_endpoint
        self.cues: deque[Cue] = deque()
        self.chat_template = "chatml"
        self.most = 10_000  # tokens of an answer, until the model ends its turn by itself
        self.loading = False
        self.sleeping = False
        self.speculative = False
        self.requests: list[Request] = []
        self.model_requests: list[Request] = []
        self.left = 0
        self.saves = 0
        self.restores = 0
        self.processed_total = 0
        self.reason_save_fails: str | None = None
        self.reason_template_fails: str | None = None
        self.spoilt_by_files = False  # refuses the next file that it is to restore, and computes otherwise from then on
        self.is_spoilt = False
        self.save_gate: asyncio.Event | None = None
        self.metrics_gate: asyncio.Event | None = None
        self.more_metrics = ""
        self.more_headers: tuple[str, ...] = ()
        self.junk: bytes | None = None
        self._changed = asyncio.Condition()
        self._words: dict[int, str] = {}
        self._server = Server(self._handle, port)

    @property
    def url(self) -> str:
        """Its base URL."""
        return self._server.url

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *details: Any) -> None:
        await self._server.__aexit__(*details)

    def restart(self) -> None:
        """What a restart leaves: no connection, no token."""
        self._server.drop_connections()
        self.is_spoilt = False
        for slot in self.slots:
            slot.tokens, slot.busy, slot.id_task = [], False, -1

    async def arrived(self, count: int) -> None:
        """Return once `count` model requests have come in."""
        await self._until(lambda: len(self.model_requests) >= count)

    async def asked(self, path: str, count: int) -> None:
        """Return once `count` requests for a path have come in."""
        await self._until(lambda: sum(r.path == path for r in self.requests) >= count)

    async def abandoned(self, count: int) -> None:
        """Return once `count` model requests were left by their client."""
        await self._until(lambda: self.left >= count)

    async def idle(self) -> None:
        """Return once no slot is busy."""
        await self._until(lambda: not any(slot.busy for slot in self.slots))

    def tokens_of(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Token ids of a text: a stable number per piece."""
        ids = []
        for piece in (self.piece if parse_special else self.plain).findall(text):
            number = zlib.crc32(piece.encode()) & 0x7FFFFFFF
            self._words[number] = piece
            ids.append(number)
        return ids

    # -- doors ------------------------------------------------------------------------------------------------------

    async def _handle(self, request: Request, answer: Answer) -> None:
        self.requests.append(request)
        answer.more_headers = self.more_headers
        await self._tell()
        if self.loading:
            return await _refuse(answer, 503, "unavailable_error", "Loading model")
        if self._lacks_key(request):
            return await _refuse(answer, 401, "authentication_error", "Invalid API Key")
        if request.path in MODEL_DOORS and request.method == "POST":
            return await self._model(request, answer)
        if request.path.startswith("/slots/") and request.method == "POST":
            return await self._slot_action(request, answer)
        if self.junk is not None and request.path in ("/v1/models", "/props"):
            return await answer.whole(200, self.junk)
        if self.reason_template_fails is not None and request.path == "/apply-template":
            return await _refuse(answer, 500, "server_error", self.reason_template_fails)
        found = self._small(request)
        if found is None:
            return await _refuse(answer, 404, "not_found_error", "File Not Found")
        if isinstance(found, str):
            if self.metrics_gate is not None:
                await self.metrics_gate.wait()
            return await answer.whole(200, found.encode(), "text/plain; version=0.0.4")
        await answer.json(found)

    def _lacks_key(self, request: Request) -> bool:
        public = request.path in ("/health", "/v1/models")
        return bool(self.api_key) and not public and request.headers.get("authorization") != f"Bearer {self.api_key}"

    def _small(self, request: Request) -> Any:
        """The answer of a door that takes no slot; None when there is no such door."""
        door = f"{request.method} {request.path}"
        if door == "GET /slots" and self.slots_endpoint:
            return [self._slot_report(i, slot) for i, slot in enumerate(self.slots)]
        if door == "GET /metrics" and self.metrics_endpoint:
            name = "llamacpp:prompt_tokens_total"
            text = f"# HELP {name} Of its own\n# TYPE {name} counter\n{name} {self.processed_total}\n"
            return text + self.more_metrics
        if door == "POST /tokenize":
            content = request.body["content"]
            parts = content if isinstance(content, list) else [content]
            special = request.body.get("parse_special", True)
            tokens = ([p] if isinstance(p, int) else self.tokens_of(p, parse_special=special) for p in parts)
            return {"tokens": [token for some in tokens for token in some]}
        if door == "POST /detokenize":
            return {"content": "".join(self._words[t] for t in request.body["tokens"])}
        if door == "POST /apply-template":
            return {"prompt": render(request.body)}
        models = {"object": "list", "data": [{"id": self.alias, "object": "model", "meta": {}}]}
        return {
            "GET /health": {"status": "ok"},
            "GET /props": self._props(),
            "GET /v1/models": models,
            "GET /models": models,
        }.get(door)

    def _props(self) -> dict[str, Any]:
        return {
            "default_generation_settings": {"params": {}, "n_ctx": self.n_ctx},
            "total_slots": len(self.slots),
            "model_alias": self.alias,
            "model_path": "/models/fake.gguf",
            "modalities": {"vision": False, "audio": False},
            "endpoint_slots": self.slots_endpoint,
            "endpoint_metrics": self.metrics_endpoint,
            "chat_template": self.chat_template,
            "build_info": "b0-fake",
            "is_sleeping": self.sleeping,
        }

    def _slot_report(self, number: int, slot: Slot) -> dict[str, Any]:
        report = {
            "id": number,
            "n_ctx": self.n_ctx,
            "speculative": self.speculative,
            "is_processing": slot.busy,
        }
        used = {"id_task": slot.id_task, "n_prompt_tokens": len(slot.tokens)}
        return report | used if slot.id_task >= 0 else report

    async def _slot_action(self, request: Request, answer: Answer) -> None:
        number, action = int(request.path.rsplit("/", 1)[1]), request.query.get("action")
        slot = self.slots[number % len(self.slots)]
        if action == "erase":
            count, slot.tokens = len(slot.tokens), []
            return await answer.json({"id_slot": number, "n_erased": count})
        if self.slot_dir is None:
            return await _refuse(answer, 501, "not_supported_error", "This server does not support slots action.")
        if "/" in request.body["filename"]:
            return await _refuse(answer, 400, "invalid_request_error", "Invalid filename")
        path = self.slot_dir / request.body["filename"]
        if action == "save":
            return await self._save(number, slot, path, answer)
        self.is_spoilt |= self.spoilt_by_files
        tokens = None if self.spoilt_by_files else _tokens_in(path)
        self.spoilt_by_files = False
        slot.tokens = tokens or []
        if tokens is None:
            return await _refuse(answer, 400, "invalid_request_error", "Unable to restore slot, invalid file")
        self.restores += 1
        await answer.json(_file_report(number, path, "restored", "read", len(tokens), path.stat().st_size))

    async def _save(self, number: int, slot: Slot, path: Path, answer: Answer) -> None:
        if self.reason_save_fails is not None:
            return await _refuse(answer, 500, "server_error", self.reason_save_fails)
        if self.save_gate is not None:
            await self.save_gate.wait()
        rows = (b"\x00\x40" * 2 * len(slot.tokens), b"\x00\x38" * 2 * len(slot.tokens))
        state = attention_state(len(slot.tokens), rows=rows) if self.is_spoilt else None
        data = slot_file(array("i", slot.tokens).tobytes(), state=state)
        path.write_bytes(data)
        self.saves += 1
        await answer.json(_file_report(number, path, "saved", "written", len(slot.tokens), len(data)))

    # -- model requests ---------------------------------------------------------------------------------------------

    async def _model(self, request: Request, answer: Answer) -> None:
        cue = self.cues.popleft() if self.cues else Cue()
        self.model_requests.append(request)
        await self._tell()
        if cue.status is not None:
            error = cue.error or {"code": cue.status, "message": "on cue", "type": "server_error"}
            return await answer.json({"error": error}, cue.status)
        body, kind = request.body, MODEL_DOORS[request.path]
        prompt = body.get("prompt", "") or str(body.get("input_prefix", ""))
        text = render(body) if kind == "chat" else prompt
        tokens = self.tokens_of(text) if isinstance(text, str) else list(text)
        if len(tokens) >= self.n_ctx:
            return await self._too_long(answer, len(tokens))
        async with self._in_slot(body.get("id_slot", -1)) as slot:
            most = min(self.n_ctx - len(tokens), self.most)
            place = {"slot": slot, "number": self.slots.index(slot), "tokens_of": self.tokens_of, "most": most}
            run = Run(kind, body, tokens, cue, **place)
            slot.id_task = len(self.model_requests)
            work = asyncio.ensure_future(cue.script(answer) if cue.script else run.answer(answer))
            gone = asyncio.create_task(request.left.wait())
            try:
                await asyncio.wait({work, gone} if not cue.ignore_leaving else {work}, return_when="FIRST_COMPLETED")
                if not work.done():
                    self.left += 1
                    work.cancel()
                    await self._tell()
                    if cue.hold_left is not None:
                        await cue.hold_left.wait()
                    raise Broken
                await work
            finally:
                work.cancel()
                gone.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)
                self.processed_total += run.n_done

    async def _too_long(self, answer: Answer, count: int) -> None:
        message = (
            f"request ({count} tokens) exceeds the available context size ({self.n_ctx} tokens), try increasing it"
        )
        extra = {"n_prompt_tokens": count, "n_ctx": self.n_ctx}
        await _refuse(answer, 400, "exceed_context_size_error", message, extra)

    @asynccontextmanager
    async def _in_slot(self, wanted: int) -> AsyncIterator[Slot]:
        free = [s for s in self.slots if not s.lock.locked()]
        slot = self.slots[wanted % len(self.slots)] if wanted >= 0 else (free or self.slots)[0]
        async with slot.lock:
            slot.busy = True
            try:
                yield slot
            finally:
                slot.busy = False
                await self._tell()

    async def _until(self, true: Any) -> None:
        async with self._changed:
            await self._changed.wait_for(true)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _refuse(answer: Answer, status: int, kind: str, message: str, extra: dict[str, Any] | None = None) -> None:
    await answer.json({"error": {"code": status, "message": message, "type": kind} | (extra or {})}, status)


def _file_report(number: int, path: Path, verb: str, moved: str, count: int, size: int) -> dict[str, Any]:
    timing = {"save_ms" if verb == "saved" else "restore_ms": 1.0}
    return {"id_slot": number, "filename": path.name, f"n_{verb}": count, f"n_{moved}": size, "timings": timing}


def _tokens_in(path: Path) -> list[int] | None:
    """The tokens of a slot file, None when it is not whole: the fake compares with what it would have written."""
    from llamacpp.slot_files import BadSlotFile, read_header

    try:
        packed = read_header(path).tokens
    except (OSError, BadSlotFile):
        return None
    tokens = array("i", packed)
    return list(tokens) if path.read_bytes() == slot_file(packed) else None
