"""The store against a dictionary: any order of changes, damage, restarts and other tenants."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from proxy.store import LedgerRecord, Snapshot, Store
from proxy.store_types import token_hash
from tests.fakes.slot_bytes import slot_file
from tests.fakes.store import FP, Ticks, files, open_store, packed, publish_temp

TENANTS = ("a", "b")
LINES = st.sampled_from(["L", "M", None])
TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=5).map(lambda ids: packed(*ids))
BUDGET = 900  # a handful of files of 100 to 250 bytes
MAX_LINES = 2


@dataclass
class Believed:
    """What the model knows of one snapshot."""

    tenant: str
    tokens: bytes
    line: str | None
    kind: str
    n_bytes: int
    last_used: float
    pinned: bool = False
    effective: bool | None = None

    @property
    def key(self) -> tuple[str, bytes]:
        return (self.tenant, self.tokens)


class StoreMachine(RuleBasedStateMachine):
    """Every rule does the same to the store and to `model`."""

    temps: Bundle[tuple[str, bytes]] = Bundle("temps")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.root = Path(tempfile.mkdtemp())
        self.clock = Ticks()
        self.model: dict[tuple[str, bytes], Believed] = {}
        self.reserved: dict[str, int] = {}
        self.ledgers: dict[str, int] = {}
        self.requests: list[str] = []
        self.store: Store = self.run(self.opened())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    async def opened(self) -> Store:
        return await open_store(self.root, budget=BUDGET, max_lines=MAX_LINES, now=self.clock, adopt_for=TENANTS)

    def teardown(self) -> None:
        try:
            self.run(self.store.close())
        finally:
            self.loop.close()
            shutil.rmtree(self.root)

    # --- the model's own sums, written down a second time

    def victims(self, wanted: int, keep: tuple[str, bytes] | None = None) -> list[Believed] | None:
        order = [b for b in self.model.values() if not b.pinned and b.key != keep]
        order.sort(key=lambda b: (b.effective is not False, b.last_used))
        gone: list[Believed] = []
        while self.total() - sum(b.n_bytes for b in gone) + sum(self.reserved.values()) + wanted > BUDGET:
            if not order:
                return gone if not wanted else None
            gone.append(order.pop(0))
        return gone

    def total(self) -> int:
        return sum(b.n_bytes for b in self.model.values())

    def forget(self, gone: list[Believed]) -> None:
        for believed in gone:
            del self.model[believed.key]

    def pick(self, data: st.DataObject) -> tuple[Believed, Snapshot]:
        key = data.draw(st.sampled_from(sorted(self.model)))
        (snapshot,) = [s for s in self.store.all() if (s.tenant, self.store.tokens(s)) == key]
        return self.model[key], snapshot

    # --- saving

    @rule(target=temps, tokens=TOKENS, reserve=st.booleans())
    def begin_save(self, tokens: bytes, reserve: bool) -> tuple[str, bytes]:
        temp = self.store.temp_name(FP)
        self.reserved[temp] = 0
        size = len(slot_file(tokens))
        if reserve:
            gone = self.victims(size)
            assert self.run(self.store.make_room(size, temp=temp)) == (gone is not None)
            if gone is not None:
                self.forget(gone)
                self.reserved[temp] = size
        (self.store.slots_dir / temp).write_bytes(slot_file(tokens))
        return temp, tokens

    @rule(
        saved=consumes(temps),
        tenant=st.sampled_from(TENANTS),
        line=LINES,
        kind=st.sampled_from(["line", "base"]),
        supersede=st.booleans(),
    )
    def publish(self, saved: tuple[str, bytes], tenant: str, line: str | None, kind: str, supersede: bool) -> None:
        temp, tokens = saved
        if temp not in self.reserved:  # its run has ended
            return
        options = {"tenant": tenant, "line": line, "kind": kind, "supersede": supersede, "expect_tokens": tokens}
        snapshot = self.run(publish_temp(self.store, temp, **options))
        del self.reserved[temp]
        old = self.model.get((tenant, tokens))
        new = Believed(tenant, tokens, line, kind, snapshot.bytes, snapshot.last_used)
        if old:
            new.pinned, new.effective = old.pinned, old.effective
            new.kind = "base" if "base" in (old.kind, kind) else "line"
        self.model[new.key] = new
        if supersede and new.kind == "line" and line is not None:
            self.forget([b for b in self.model.values() if self.is_superseded(b, new)])
        self.forget(self.victims(0, keep=new.key) or [])

    @staticmethod
    def is_superseded(old: Believed, new: Believed) -> bool:
        same = (old.tenant, old.line, old.kind, old.pinned) == (new.tenant, new.line, "line", False)
        return same and old.tokens != new.tokens and new.tokens.startswith(old.tokens)

    @rule(saved=consumes(temps))
    def give_up(self, saved: tuple[str, bytes]) -> None:
        self.run(self.store.discard(saved[0]))
        self.reserved.pop(saved[0], None)

    @rule(saved=consumes(temps), n_bytes=st.integers(0, 60))
    def publish_what_was_cut_off(self, saved: tuple[str, bytes], n_bytes: int) -> None:
        temp, tokens = saved
        if temp not in self.reserved:
            return
        os.truncate(self.store.slots_dir / temp, n_bytes)
        try:
            self.run(publish_temp(self.store, temp, expect_bytes=len(slot_file(tokens))))
            raise AssertionError("published")
        except Exception as err:
            assert type(err).__name__ == "StoreError"
        del self.reserved[temp]

    @rule(wanted=st.integers(1, BUDGET + 100))
    def make_room(self, wanted: int) -> None:
        gone = self.victims(wanted)
        assert self.run(self.store.make_room(wanted)) == (gone is not None)
        self.forget(gone or [])

    # --- one snapshot

    @precondition(lambda self: self.model)
    @rule(data=st.data(), what=st.sampled_from(["touch", "pin", "unpin", "good", "useless", "remove"]))
    def change_one(self, data: st.DataObject, what: str) -> None:
        believed, snapshot = self.pick(data)
        if what == "touch":
            self.run(self.store.touch(snapshot.id))
            believed.last_used = self.clock.time
        elif what in ("pin", "unpin"):
            self.run(getattr(self.store, what)(snapshot.id))
            believed.pinned = what == "pin"
        elif what == "remove":
            self.run(self.store.remove(snapshot.id))
            self.forget([believed])
        else:
            self.store.mark_effective(snapshot.id, what == "good")
            believed.effective = what == "good"

    @precondition(lambda self: self.model)
    @rule(data=st.data(), how=st.sampled_from(["delete", "cut", "foreign"]), when=st.sampled_from(["verify", "prune"]))
    def damage(self, data: st.DataObject, how: str, when: str) -> None:
        believed, snapshot = self.pick(data)
        if how == "delete":
            snapshot.path.unlink()
        elif how == "cut":
            os.truncate(snapshot.path, data.draw(st.integers(0, snapshot.bytes - 1)))
        else:
            snapshot.path.write_bytes(slot_file(packed(*[9] * snapshot.n_tokens)))
        if when == "verify":
            assert not self.run(self.store.verify(snapshot))
            self.run(self.store.discard("nothing"))  # behind the deletion
        else:
            self.run(self.store.prune())
        self.forget([believed])
        if when == "prune":
            self.forget(self.victims(0) or [])

    @rule(n=st.integers(0, 3))
    def litter(self, n: int) -> None:
        """Files of nobody: gone after prune, never offered."""
        (self.store.slots_dir / f"{FP}-{n:016x}.tmp").write_bytes(b"half")
        (self.store.slots_dir / f"{FP}-{n:032x}.bin").write_bytes(slot_file(packed(n)))
        self.run(self.store.prune())
        self.forget(self.victims(0) or [])

    # --- ledgers, requests, everything

    @rule(line=st.sampled_from("LMN"), n=st.integers(0, 99))
    def put_ledger(self, line: str, n: int) -> None:
        self.store.put_ledger(LedgerRecord(line, "a", "s", "g", b"", (), n, 0.0))
        self.ledgers.pop(line, None)
        self.ledgers[line] = n
        while len(self.ledgers) > MAX_LINES:
            del self.ledgers[next(iter(self.ledgers))]

    @rule(id_=st.sampled_from("xyz"))
    def put_request(self, id_: str) -> None:
        self.store.put_request({"id": id_})
        self.requests = [r for r in self.requests if r != id_] + [id_]

    @rule(line=st.sampled_from("LMN"))
    def forget_line(self, line: str) -> None:
        self.run(self.store.forget_line(line))
        self.ledgers.pop(line, None)
        self.forget([b for b in self.model.values() if b.line == line])

    @rule()
    def purge(self) -> None:
        self.run(self.store.purge())
        self.model, self.reserved, self.ledgers, self.requests = {}, {}, {}, []

    @rule()
    def restart(self) -> None:
        self.run(self.store.close())
        self.reserved = {}
        self.store = self.run(self.opened())
        self.forget(self.victims(0) or [])

    @rule()
    def restart_without_database(self) -> None:
        """Everything is adopted from the files' headers, but what only the database knew is lost."""
        self.run(self.store.close())
        (self.root / "state.db").unlink()
        self.reserved, self.ledgers, self.requests = {}, {}, []
        for believed in self.model.values():
            path = self.root / "slots" / f"{FP}-{token_hash(believed.tenant, believed.tokens)}.bin"
            os.utime(path, (believed.last_used, believed.last_used))
            believed.line, believed.kind, believed.pinned, believed.effective = None, "line", False, None
        self.store = self.run(self.opened())
        self.forget(self.victims(0) or [])

    # --- what must always hold

    @invariant()
    def index_is_the_model(self) -> None:
        found = {(s.tenant, self.store.tokens(s)): s for s in self.store.all()}
        assert found.keys() == self.model.keys()
        for key, believed in self.model.items():
            s = found[key]
            assert (s.line, s.kind, s.pinned, s.effective) == (
                believed.line, believed.kind, believed.pinned, believed.effective)  # fmt: skip
            assert (s.bytes, s.n_tokens, s.last_used) == (
                believed.n_bytes, len(believed.tokens) // 4, believed.last_used)  # fmt: skip

    @invariant()
    def each_tenant_is_offered_its_own(self) -> None:
        for tenant in TENANTS:
            offered = self.store.candidates(tenant, FP)
            assert {self.store.tokens(s) for s in offered} == {t for owner, t in self.model if owner == tenant}
            assert [s.n_tokens for s in offered] == sorted((s.n_tokens for s in offered), reverse=True)

    @invariant()
    def the_disk_is_the_index(self) -> None:
        assert files(self.store) == {s.file for s in self.store.all()} | set(self.reserved)
        assert self.store.total_bytes == sum(s.path.stat().st_size for s in self.store.all())

    @invariant()
    def ledgers_and_requests_are_the_models(self) -> None:
        assert {r.line: r.n_tokens for r in self.run(self.store.load_ledgers())} == self.ledgers
        assert [r["id"] for r in self.store.load_requests()] == self.requests


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
