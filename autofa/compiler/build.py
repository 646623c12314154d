"""Builds the libraries that are missing, all together, and reports each as it is done."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autofa.compiler import cache, execute, trial
from autofa.compiler.diagnostics import (
    Usage,
    headline,
    killed_for_memory,
    parse_usage,
    serialized,
)
from autofa.compiler.execute import Job, Outcome, find_ninja
from autofa.compiler.fingerprint import fingerprint
from autofa.compiler.jobs import default_jobs
from autofa.compiler.lock import Lock
from autofa.compiler.render import identity, include_roots, static_smem_bytes, stub
from autofa.compiler.targets import kind_of, source_suffix
from autofa.compiler.toolchain import Toolchain, compile_command, find, unsupported
from autofa.errors import ToolchainError
from autofa.kernels.family import Variant
from autofa.settings import Settings

Request = tuple[Variant, str]

TIMEOUT_SECONDS = 300.0

_log = logging.getLogger("autofa.compiler")
_LOCK_POLL_SECONDS = 0.1
_LOCK_SILENCE_SECONDS = 1.0
_BUILD_PREFIX = ".build-"


@dataclass(frozen=True)
class Build:
    """How the build of one variant for one target ended.

    Attributes:
        status: `ok`, `compile_error`, `timeout` or `out_of_memory`.
        library: None unless ok.
        cached: it was there already.
        seconds, cpu_seconds: what compiling took now; 0 if cached.
        message: why it failed, in one line, with the path of the compiler's whole output.
        usage: registers, shared memory and spills of a CUDA kernel.
        compiler: what compiled it.
    """

    variant: Variant
    target: str
    status: str
    library: Path | None = None
    cached: bool = False
    seconds: float = 0.0
    message: str = ""
    usage: Usage | None = None
    cpu_seconds: float = 0.0
    compiler: str = ""


class _Run:
    """One call of `build`: what is asked, what is done, what is left."""

    def __init__(
        self,
        requests: Sequence[Request],
        settings: Settings,
        timeout: float,
        on_done: Callable[[Build], None] | None,
        anew: bool,
    ) -> None:
        self.settings = settings
        self.anew = anew
        self.timeout = timeout
        self.on_done = on_done
        self.pending = list(dict.fromkeys(requests))
        self.done: dict[Request, Build] = {}
        self.toolchains: dict[str, Toolchain] = {}
        self.probed: set[str] = set()
        self.keys: dict[Request, str] = {}

    def finish(self, build: Build) -> None:
        request = (build.variant, build.target)
        self.done[request] = build
        self.pending.remove(request)
        if self.on_done is not None:
            self.on_done(build)

    def take_cached(self) -> None:
        """Finishes what is in the cache, unless another compiler made it than would make it now."""
        for variant, target in [] if self.anew else list(self.pending):
            found = cache.cached_library(variant, target, self.settings)
            record = cache.record_of(found) if found is not None else None
            toolchain = self.toolchains.get(kind_of(target))
            if found is None or (record and toolchain and record.compiler != toolchain.version):
                # A prebuilt one is taken whatever made it: most of its users have no compiler.
                found = cache.prebuilt_library(variant, target)
                record = cache.record_of(found) if found is not None else None
            if found is not None:
                usage = record.usage if record else None
                compiler = record.compiler if record else ""
                build = Build(variant, target, "ok", found, True, usage=usage, compiler=compiler)
                self.finish(build)

    def is_complete(self) -> bool:
        """Whether every library is there, by whatever compiler: then none is even looked for."""
        return not any(map(self.is_missing, self.pending))

    def is_missing(self, request: Request) -> bool:
        return self.anew or cache.library_of(*request, self.settings) is None

    def find_toolchains(self) -> None:
        missing = list(filter(self.is_missing, self.pending))
        for kind in sorted({kind_of(target) for _, target in missing}):
            self.toolchains[kind] = find(kind, self.settings)
        for variant, target in missing:
            why = unsupported(self.toolchains[kind_of(target)], target, self.settings)
            if why is not None:
                self.finish(Build(variant, target, "compile_error", message=why))

    def wait_for(self, lock: Lock) -> bool:
        """Takes the lock; False if meanwhile others have built everything."""
        started, told = time.monotonic(), False
        while not self._acquire(lock):
            self.take_cached()
            if not self.pending:
                return False
            if not told and time.monotonic() - started > _LOCK_SILENCE_SECONDS:
                told = True
                _log.warning("waiting for %s, which is building too", lock.holder())
            time.sleep(_LOCK_POLL_SECONDS)
        return True

    def _acquire(self, lock: Lock) -> bool:
        with cache.writing(lock.folder):
            return lock.acquire()

    def compile(self, folder: Path, jobs: int) -> None:
        """Compiles all that is pending in `folder`; what was disturbed once more, by itself."""
        work = list(self.pending)
        disturbed = []
        with contextlib.closing(self._execute(work, folder, jobs)) as outcomes:
            for outcome in outcomes:
                request = work[outcome.index]
                log = execute.log_of(folder, outcome.index)
                edited = fingerprint(*request) != self.keys[request]
                if edited or (killed_for_memory(outcome.code, log) and not outcome.expired):
                    disturbed.append(request)
                else:
                    self._conclude(request, outcome, folder)
        for request in disturbed:
            for outcome in self._execute([request], folder, 1):
                self._conclude(request, outcome, folder)

    def _execute(
        self, work: list[Request], folder: Path, jobs: int
    ) -> Generator[Outcome, None, None]:
        planned = []
        for index, (variant, target) in enumerate(work):
            toolchain = self.toolchains[kind_of(target)]
            key = self.keys[variant, target] = fingerprint(variant, target)
            source = folder / f"{index}{source_suffix(target)}"
            says = identity(variant.slug, key, target, toolchain.version)
            with cache.writing(folder):
                source.write_text(says + stub(variant))
            command = compile_command(
                toolchain, target, include_roots(variant), source.name, f"{index}.so"
            )
            planned.append(Job(index, command))
        # Only what fails in there is caught, not what the caller does between two outcomes.
        with cache.writing(folder):
            yield from execute.run(planned, folder, self.settings, jobs, self.timeout)

    def _conclude(self, request: Request, outcome: Outcome, folder: Path) -> None:
        variant, target = request
        toolchain = self.toolchains[kind_of(target)]
        log = execute.log_of(folder, outcome.index)
        place, name = cache.directory(self.settings, target), cache.stem(variant, target)
        library, usage = None, None
        key = self.keys[request]
        if outcome.expired:
            status, why = "timeout", f"the compiler was stopped after {self.timeout:g} s"
        elif fingerprint(variant, target) != key:
            status, why = (
                "compile_error",
                "its sources were edited while it was compiled: build it again",
            )
        elif outcome.code == 0 and (said := serialized(log)) is not None:
            status, why = "compile_error", said
        elif outcome.code == 0:
            status, why = "ok", ""
            usage = parse_usage(log, static_smem_bytes(variant))
            record = cache.Record(
                *(variant.slug, target, key, toolchain.version),
                *(outcome.seconds, outcome.cpu_seconds, usage),
            )
            with cache.writing(place):
                library = cache.publish(folder / f"{outcome.index}.so", place, name, record)
        elif killed_for_memory(outcome.code, log):
            status, why = "out_of_memory", "the compiler was killed for want of memory, twice"
        else:
            cache.refuse_full(folder, log)
            self._probe(toolchain, target, folder)
            status, why = "compile_error", headline(log, include_roots(variant))
        if library is None:
            kept = place / f"{name}.log"
            with cache.writing(place):
                kept.write_text(log)
            why = f"{why} [{kept}]"
        self.finish(
            Build(
                *(variant, target, status, library, False, outcome.seconds, why, usage),
                cpu_seconds=outcome.cpu_seconds,
                compiler=toolchain.version,
            )
        )

    def _probe(self, toolchain: Toolchain, target: str, folder: Path) -> None:
        """After a failure: raises if this compiler cannot compile an empty file either."""
        if target in self.probed:
            return
        self.probed.add(target)
        place = folder / "probe"
        place.mkdir(exist_ok=True)
        with cache.writing(folder):
            log = trial.failure(toolchain, target, place, self.settings, self.timeout)
        if log is not None:
            kept = cache.directory(self.settings, target) / "toolchain.log"
            kept.write_text(log)
            raise ToolchainError(f"{trial.sentence(toolchain, target, log)} [{kept}]; {trial.DO}")


def build(
    requests: Sequence[Request],
    settings: Settings,
    *,
    jobs: int | None = None,
    timeout: float = TIMEOUT_SECONDS,
    on_done: Callable[[Build], None] | None = None,
    anew: bool = False,
) -> list[Build]:
    """Sees to it that each (variant, target) has a library; one `Build` per request, in order.

    What is in the cache is not compiled again, and while nothing is missing no compiler is looked
    for. When something is, cached libraries of another compiler are made anew too. `on_done` is
    called from this thread, once per distinct request, as soon as that one is finished. Failures of
    a variant are values. May be called from any thread and from several processes: who comes second
    waits, and compiles only what then is still missing.

    Args:
        jobs: compilers at once; None is `default_jobs`.
        timeout: seconds that one compilation may take.
        anew: compile, and replace, what is in the cache too.

    Raises:
        ToolchainError: before any work: no usable compiler or ninja, or the cache cannot be
            written. Later: the compiler fails whatever it is given; what is done stays.
        UsageError: an unknown target.
    """
    run = _Run(requests, settings, timeout, on_done, anew)
    if run.is_complete():
        run.take_cached()
        return [run.done[request] for request in requests]
    run.find_toolchains()
    if run.pending:
        kinds = {kind_of(target) for _, target in run.pending}
        parallel = jobs or min(default_jobs(settings, kind) for kind in kinds)
        parallel = min(parallel, len(run.pending))
        if parallel > 1:
            find_ninja(settings)
        targets = sorted({target for _, target in run.pending})
        folders = [cache.directory(settings, target) for target in targets]
        for folder in folders:
            cache.make_private(folder)
        run.take_cached()
        if run.pending:
            _compile_locked(run, folders, parallel)
    return [run.done[request] for request in requests]


def _compile_locked(run: _Run, folders: list[Path], jobs: int) -> None:
    with contextlib.ExitStack() as stack:
        # Always in the same order, so that no two builds wait for each other.
        for folder in folders:
            if not run.wait_for(stack.enter_context(Lock(folder))):
                return
        run.take_cached()
        if not run.pending:
            return
        for stale in (s for folder in folders for s in folder.glob(f"{_BUILD_PREFIX}*")):
            shutil.rmtree(stale, ignore_errors=True)  # of a build that was killed: we have its lock
        with cache.writing(folders[0]):
            place = tempfile.mkdtemp(prefix=_BUILD_PREFIX, dir=folders[0])
        try:
            run.compile(Path(place).absolute(), jobs)
        finally:
            shutil.rmtree(place, ignore_errors=True)
