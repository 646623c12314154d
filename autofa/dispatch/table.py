"""Fills the runtime's table: what a call that found no entry asks, and what it is told.

The runtime calls `Table.miss` once per key; the answer is stored there, so this code is off the hot
path. It must never raise into the runtime, wait for another thread, or compile.
"""

from __future__ import annotations

import _thread
import logging
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from autofa import compiler
from autofa.compiler import fingerprint, library_of
from autofa.device import DeviceKey, Limits, cpu_key, cpu_limits
from autofa.dispatch import shortcut
from autofa.dispatch.background import Builder, Fetcher, Importer, Request
from autofa.dispatch.evidence import READ_LIMIT, gather, is_server, shipped
from autofa.dispatch.keys import DEVICE_TYPES, device_index, key_of, problem_of_key
from autofa.dispatch.ladder import Decision, Evidence, Question, Sources, resolve
from autofa.errors import DOCTOR, LaunchError
from autofa.kernels import REGISTRY, Registry
from autofa.kernels.family import Variant
from autofa.problem import Problem, bucket_of
from autofa.runtime import devices, extension, kernels, vendors
from autofa.runtime.abi import FLAG_DETERMINISTIC, FLAG_FAST, FLAG_LSE, LaunchKey
from autofa.settings import Settings
from autofa.store.ranking import validity
from autofa.store.rows import Row

log = logging.getLogger("autofa")

_LATE = (
    "calls with gradients began before the server's measurements were read, and keep their "
    "kernels; `autofa.warmup()` before the first of them, or `autofa.reload()` between two steps, "
    "gives them the winners"
)
NOT_NOW = -1  # torch.sdpa for this call; the next one asks again


@dataclass(frozen=True)
class Counts:
    """What this process has done so far, for tests and `autofa doctor`."""

    reads: int = 0
    misses: int = 0
    swaps: int = 0


@dataclass(frozen=True)
class Place:
    """One device as the ladder sees it."""

    device: DeviceKey
    limits: Limits


class Table:
    """The winners of one process. All methods are thread-safe.

    Args:
        settings: what the environment said; `reload` makes a new table with new ones.
    """

    def __init__(self, settings: Settings, registry: Registry = REGISTRY) -> None:
        self.settings = settings
        self.registry = registry
        self._places: dict[tuple[str, int], Place] = {}
        self._evidence: dict[DeviceKey, Evidence] = {}
        # Devices whose rows a server is being asked for, and what was answered without them.
        self._unread: dict[DeviceKey, list[LaunchKey]] = {}
        # What is being built, for one target, or imported, by its slug.
        self._waiting: dict[Request | str, list[LaunchKey]] = {}
        self._broken: set[Path] = set()
        self._warned: set[str] = set()
        self.counts = Counts()
        self._renew()

    def _renew(self) -> None:
        # Also in a forked child, where another thread's lock would stay taken for ever and the
        # builder's thread does not exist.
        self._lock = threading.RLock()
        self._builder = Builder(self.settings, self._swap, self._is_broken)
        self._importer = Importer(self._swap)
        self._fetcher = Fetcher(lambda device: gather(device, self.settings), self._arrived)

    def retire(self) -> None:
        """Another table takes its place: what a server sends now changes no answer."""
        with self._lock:
            self._unread.clear()

    def after_fork(self) -> None:
        """Makes the table usable in a forked child."""
        self._renew()
        for wanted in self._waiting:
            self._ask_for(wanted)
        for device in self._unread:
            self._fetcher.request(device)

    def miss(self, key: LaunchKey) -> int:
        """The id of the kernel that answers `key`: the runtime's callback. Never raises.

        Args:
            key: the table keeps it; not the runtime's own memory.
        """
        try:
            return self._miss(key)
        except KeyboardInterrupt:
            _thread.interrupt_main()  # raised again where Python can hand it to the caller
            return NOT_NOW
        except Exception as error:
            said = f"a look-up failed ({error!r}); plain SDPA answers; {DOCTOR}"
            self._warn_once("look-up", said)
            return kernels.SDPA

    def _miss(self, key: LaunchKey) -> int:
        deterministic = bool(key.flags & FLAG_DETERMINISTIC)
        if deterministic:
            self.known(self.place(DEVICE_TYPES[key.device_type], key.device_index).device)
        # Whoever comes while another thread reads the database gets plain SDPA at once. Under
        # deterministic mode the answer must not depend on that race, so there the thread waits.
        if not self._lock.acquire(blocking=deterministic):
            return NOT_NOW
        try:
            self.counts = replace(self.counts, misses=self.counts.misses + 1)
            return self._answer(key, swap=not deterministic)
        finally:
            self._lock.release()

    def _answer(self, key: LaunchKey, *, swap: bool) -> int:
        place = self.place(DEVICE_TYPES[key.device_type], key.device_index)
        question = Question(
            problem_of_key(key),
            place.device,
            place.limits,
            "graph" if key.graph else "eager",
            bool(key.aligned),
            bool(key.flags & FLAG_DETERMINISTIC),
            "fast" if key.flags & FLAG_FAST else "f32",
            bool(key.flags & FLAG_LSE),
        )
        evidence = self.evidence_of(place.device)
        decision, kernel = self._loaded(question, evidence, key if swap else None)
        if swap and place.device in self._unread:
            self._unread[place.device].append(key)
        if decision.wanted is not None and swap:
            target = decision.wanted.target(place.limits)
            self._wait_for((decision.wanted, target), key)
        if kernel == kernels.SDPA and not question.needs_lse:
            shortcut.sdpa_won()
        log.debug("%s: %s", bucket_of(question.problem), decision.explanation.reason)
        return kernel

    def _loaded(
        self, question: Question, evidence: Evidence, key: LaunchKey | None
    ) -> tuple[Decision, int]:
        """What the ladder says among what can be loaded, and its kernel id.

        Args:
            key: whose answer may be swapped later; None: wait for imports.
        """
        while True:
            decision = self.decide(question, evidence)
            slug = decision.candidate.slug
            if key is not None and vendors.pending(slug):
                self._wait_for(slug, key)
                decision = self.decide(question, evidence, pending=False)
            try:
                return decision, kernels.load(decision.candidate, decision.library)
            except LaunchError as error:
                if decision.library is None and vendors.failure(slug) is None:
                    raise
                if decision.library is None:
                    self._warn_once(slug, f"{error}; another kernel answers")
                    continue
                self._broken.add(decision.library)
                # One mount without execution rights spoils every library: one warning for all.
                self._warn_once("library", f"{decision.library} is not used: {error}; {DOCTOR}")

    def _wait_for(self, wanted: Request | str, key: LaunchKey) -> None:
        self._waiting.setdefault(wanted, []).append(key)
        self._ask_for(wanted)

    def _ask_for(self, wanted: Request | str) -> None:
        if isinstance(wanted, str):
            self._importer.request(wanted)
        else:
            self._builder.request(*wanted)

    def _swap(self, wanted: Request | str) -> None:
        """Puts what has just been built or imported in where it is the winner."""
        with self._lock:
            if not isinstance(wanted, str):
                # It may load now; if it still does not, that is found out again.
                self._broken -= {library_of(*wanted, self.settings)}
            for key in self._waiting.pop(wanted, []):
                if torch.are_deterministic_algorithms_enabled():
                    return
                if not key.flags & FLAG_LSE:  # those keep what they started with
                    extension.table_set(key, self._answer(key, swap=False))
                self.counts = replace(self.counts, swaps=self.counts.swaps + 1)
            shortcut.forget()

    def _arrived(self, device: DeviceKey, evidence: Evidence) -> None:
        """A server's rows are there: what was answered without them is answered again."""
        with self._lock:
            self._evidence[device] = evidence
            keys = self._unread.pop(device, [])
            if not evidence.buckets or torch.are_deterministic_algorithms_enabled():
                return
            for key in keys:
                kernel = self._answer(key, swap=True)
                if not key.flags & FLAG_LSE:  # those keep what they started with
                    extension.table_set(key, kernel)
                    self.counts = replace(self.counts, swaps=self.counts.swaps + 1)
                elif kernel != extension.table_get(key):
                    self._warn_once("late", _LATE)
            shortcut.forget()

    def _is_broken(self, variant: Variant, target: str) -> bool:
        """Whether its library is there and does not load, and compiling it again may mend that: it
        was made for another C library, say. A mount that executes nothing will not load that."""
        path = library_of(variant, target, self.settings)
        if path is None or path not in self._broken:
            return False
        return not os.statvfs(path).f_flag & os.ST_NOEXEC

    def decide(self, question: Question, evidence: Evidence, *, pending: bool = True) -> Decision:
        """What the ladder says. Loads nothing, builds nothing.

        Args:
            pending: whether kernels whose library is not imported yet may answer.
        """

        def library(variant: Variant) -> Path | None:
            path = library_of(variant, variant.target(question.limits), self.settings)
            return None if path in self._broken else path

        def valid(row: Row) -> str:
            unusable = vendors.failure(row.slug)
            if unusable is not None:
                return unusable
            if not pending and vendors.pending(row.slug):
                return "its library is not imported yet"
            return validity(row, self.registry, fingerprint)

        return resolve(question, evidence, Sources(self.registry, valid, library))

    def place(self, kind: str, index: int) -> Place:
        """A device of this process, its limits and its rows.

        Args:
            index: as `device_index` gives it.
        """
        with self._lock:
            found = self._places.get((kind, index))
            if found is None:
                if kind == "cpu":
                    # Not this thread's number of threads: the background builder asks too.
                    key, limits = cpu_key(index), cpu_limits(index)
                else:
                    cuda = torch.device(kind, index)
                    key, limits = devices.device_key(cuda), devices.limits(cuda)
                self.evidence_of(key)
                found = self._places[kind, index] = Place(key, limits)
            return found

    def evidence_of(self, device: DeviceKey) -> Evidence:
        """The rows about a device, read once per process; a server's once they are there."""
        with self._lock:
            found = self._evidence.get(device)
            if found is None:
                self.counts = replace(self.counts, reads=self.counts.reads + 1)
                if is_server(self.settings):
                    found = shipped(device, lost="its server is being read")
                    self._unread[device] = []
                    self._fetcher.request(device)
                else:
                    found = gather(device, self.settings)
                self._evidence[device] = found
            return found

    def known(self, device: DeviceKey) -> Evidence:
        """The rows about a device, a server's too: waits for them. Not for the hot path, and not
        with the lock held."""
        found = self.evidence_of(device)
        if device not in self._unread:
            return found
        self._fetcher.wait(2 * READ_LIMIT)
        return self.evidence_of(device)

    def prepare(self, problem: Problem, device: torch.device, flags: int) -> Decision:
        """Builds, loads, launches once and enters the winner of `problem`, for captured and for
        eager calls.

        Raises:
            AutofaError: the winner's library is missing and could not be built.
        """
        index = device_index(device)
        place = self.place(device.type, index)
        evidence = self.known(place.device)
        launched: set[int] = set()
        for mode in ("graph", "eager"):
            question = Question(
                problem,
                place.device,
                place.limits,
                mode,
                deterministic=bool(flags & FLAG_DETERMINISTIC),
                precision="fast" if flags & FLAG_FAST else "f32",
            )
            decision = self.decide(question, evidence)
            if decision.wanted is not None:
                target = decision.wanted.target(place.limits)
                result = compiler.build([(decision.wanted, target)], self.settings)[0]
                if result.status != "ok":
                    raise LaunchError(f"{decision.wanted} was not built: {result.message}")
            decision, kernel = self._loaded(question, evidence, None)
            key = key_of(problem, index, graph=mode == "graph", flags=flags)
            if kernel not in launched:
                kernels.launch_once(kernel, problem, device)
                launched.add(kernel)
            extension.table_set(key, kernel)
        return decision

    def wait(self, timeout: float) -> bool:
        """Waits for the background reads, builds and imports; False if they take longer."""
        workers = (self._fetcher, self._builder, self._importer)
        return all(worker.wait(timeout) for worker in workers)

    def _warn_once(self, kind: str, message: str) -> None:
        log.log(logging.INFO if kind in self._warned else logging.WARNING, "%s", message)
        self._warned.add(kind)
