"""What must hold between any two iterations of the event loop, and what once all is quiet. Rules have their numbers in docs/design.md.

The checks read the state of the service; nothing in the service is there for them.
"""

import asyncio
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from attend.serving import byte_budget, executor
from attend.serving.sessions import transfer
from simulation.process import Process
from simulation.threads import SimulatedExecutor
from simulation.world import Failure

CHECKED_EVERY = 7  # iterations: between them, the sums over all sessions are not checked


class Rules:
    """The rules of one process."""

    def __init__(self, process: Process, alone: bool = True) -> None:
        """`alone`: whether what all processes of the world share is watched too."""
        self.process, self.world, self.service = process, process.world, process.service
        codecs = process.service.engine.codecs
        self._pools = [(pool, pool.free) for pool in (codecs._small_bodies, codecs._large_bodies)]
        self._tensors: list[weakref.ref[Any]] = []  # of calls that were computed
        self._watched = executor._results, transfer._file_of, byte_budget.Lease.add
        if alone:
            self._watch_computing()
            self._watch_work()

    def close(self) -> None:
        """Watch no more, since the process has died."""
        executor._results, transfer._file_of, byte_budget.Lease.add = self._watched  # type: ignore[method-assign]

    def _watch_computing(self) -> None:
        """Remember the tensors of each call that is computed."""
        results = executor._results

        def watched(batch: Any) -> Any:
            self._tensors += [weakref.ref(one.call.query) for one in batch if one.call is not None]
            self._require_batch(batch)
            return results(batch)

        executor._results = watched

    def _watch_work(self) -> None:
        """Nothing is done for callers who have left, and nothing large is made before its bytes are counted."""
        engine, scheduler, budget = self.service.engine, self.service.scheduler, self.service.budget
        check_and_run, start, file_of = engine.check_and_run, scheduler._start, transfer._file_of
        add = byte_budget.Lease.add

        def watched_run(request: Any, function: Any, *args: Any) -> Any:
            gone = request.gone()
            result = check_and_run(request, function, *args)
            self._require(not gone, "rule 2", f"{function} was called for a caller who had left")
            return result

        def watched_start(loop: Any, batch: Any) -> None:
            self._require(not any(job.is_abandoned() for job in batch), "rule 2", "a batch has calls of callers who have left")
            start(loop, batch)

        def watched_export(session: Any) -> Any:
            self._require(
                budget.held >= session.cache.size, "rule 13", f"{session.cache.size} bytes are exported, {budget.held} are counted"
            )
            return file_of(session)

        def watched_add(lease: Any, size: int) -> None:
            before = lease.used
            add(lease, size)
            own, free = budget.taken(lease.caller), budget.capacity - budget.used
            bounded = lease.used == before or (free >= 0 and own <= budget.times * free)
            self._require(bounded, "rule 13", f"a caller takes {lease.used - before} bytes, has {own}, and {free} are free")

        byte_budget.Lease.add = watched_add  # type: ignore[method-assign]
        engine.check_and_run = watched_run  # type: ignore[method-assign]
        scheduler._start = watched_start  # type: ignore[method-assign]
        transfer._file_of = watched_export

    def _require_batch(self, batch: Any) -> None:
        """A batch is formed of calls that may share one."""
        first, limits = batch[0], self.service.scheduler.batch_limits
        self._require(len(batch) <= (first.operation.largest_batch or limits.calls), "rule 6", f"a batch of {len(batch)} calls")
        keys = {one.batch_key for one in batch}
        self._require(len(batch) == 1 or (len(keys) == 1 and None not in keys), "rule 6", "a batch of calls that differ")
        caches = [id(one.operation.cache) for one in batch if one.operation.changes_state]
        self._require(len(set(caches)) == len(caches), "sessions", "two steps of one session in a batch")

    def _require(self, holds: bool, rule: str, what: str) -> None:
        if not holds:
            self.world.fail(Failure(rule, what))

    # Between iterations

    def check(self) -> None:
        """What holds at any time. Cheap, since it runs before each iteration."""
        service, require = self.service, self._require
        scheduler, budget = service.scheduler, service.budget
        queue, occupancy = scheduler._queue, scheduler._occupancy
        require(0 <= budget.used <= budget.held, "rule 13", f"the byte budget counts {budget.used} of {budget.held} bytes")
        require(occupancy.calls == len(queue), "rule 5", f"{occupancy.calls} calls are counted, and {len(queue)} wait")
        working = scheduler._running is not None or scheduler._scheduled
        require(working or not len(queue), "rule 4", "calls wait, and nothing will compute them")
        for pool, most in self._pools:
            waits = pool.queue.first()
            require(0 <= pool.free <= most, "slots", f"{pool.free} of {most} threads are free")
            require(waits is None or not pool.free or waits.future.cancelled(), "rule 4", "a body waits for a thread, and one is free")
        require(service.engine.renderer.waiting.used >= 0, "slots", "fewer than 0 pictures wait")
        if (sessions := service.engine.sessions) is not None:
            require(sessions.pool.used <= sessions.capacity, "rule 13", f"the pages have {sessions.pool.used} of {sessions.capacity} bytes")
        if self.world.steps % CHECKED_EVERY == 0:
            self._check_sums()

    def _check_sums(self) -> None:
        """Counters equal the sums of what they count."""
        service, require = self.service, self._require
        scheduler, budget = service.scheduler, service.budget
        waiting = list(scheduler._queue)
        operations = sum(job.prepared.cost.operations for job in waiting)
        require(scheduler._occupancy.operations.used == operations, "rule 5", "the operations of the waiting calls are miscounted")
        require(budget.used == sum(size for _, size in budget.items()), "rule 13", "the bytes of the callers are not those of all")
        if (sessions := service.engine.sessions) is not None:
            self._check_sessions(sessions)

    def _check_sessions(self, sessions: Any) -> None:
        require, pool = self._require, sessions.pool
        owned = [session for owner in sessions._owners.values() for session in owner.sessions.values()]
        require({id(one) for one in owned} == {id(one) for one in sessions._sessions.values()}, "sessions", "owners have other sessions")
        require(sessions._numbers.used == len(sessions), "sessions", "the sessions of the owners are miscounted")
        for owner, of_owner in sessions._owners.items():
            require(bool(of_owner.sessions), "sessions", "an owner without sessions is kept")
            for session in of_owner.sessions.values():
                used = session.id in of_owner.in_use, session.id in of_owner.unused
                require(
                    used == (session.calls > 0, session.calls == 0), "sessions", f"a session with {session.calls} calls is kept as {used}"
                )
                require(session.owner == owner, "no caller sees another's data", "a session is another owner's")
        pages = {id(page): page for session in owned for page in session.cache.pages}
        have = Counter(id(page) for session in owned for page in session.cache.pages)
        for key, page in pages.items():
            require(bool(page.tensors) and page.caches >= have[key], "pages", "a page is freed that a session has")
        require(sum(pool.of_owner.values()) == pool.used, "pages", "the pages of the owners are not all")
        require(pool.used >= sum(page.size for page in pages.values()), "pages", "pages are not counted")

    # When all is quiet

    def unsettled(self) -> list[str]:
        """What is not yet as it must be when nobody calls any more; empty if all is."""
        service, server = self.service, self.process.server
        scheduler, budget = service.scheduler, service.budget
        counts = {
            "rule 13: bytes held": budget.held,
            "rule 13: bytes of the budget": budget.used,
            "rule 13: callers with bytes": len(budget),
            "rule 5: waiting calls": len(scheduler._queue),
            "rule 5: operations": scheduler._occupancy.operations.used,
            "rule 5: memory": scheduler._occupancy.memory_bytes.used,
            "rule 5: flows with cost": len(scheduler._occupancy.operations) + len(scheduler._occupancy.memory_bytes),
            "running batches": int(scheduler._running is not None),
            "busy threads of the codec pool": self._busy_codec_threads(),
            "pictures": service.engine.renderer.waiting.used,
            "jobs of threads": sum(len(pool.queue) for pool in SimulatedExecutor.all if pool.process == self.process.name),
            **self._counts_of_files(),
            "connections": len(server.server_state.connections),
            "requests": len(server.server_state.tasks),
            "gRPC calls": len(self.process.grpc.calls) if self.process.grpc is not None else 0,
            "tasks": len(self._tasks()),
            "rule 9: the process is not ready": int(not service.ready),
            **self._counts_of_sessions(),
        }
        return [f"{name}: {count}" for name, count in counts.items() if count]

    def _busy_codec_threads(self) -> int:
        return sum(most - pool.free + len(pool.queue) for pool, most in self._pools)

    def _counts_of_files(self) -> dict[str, int]:
        """Of the folder of layers: a process has only the file open that tells the others that it lives."""
        if (files := self.process.chosen.files) is None:
            return {}
        left = self.process.unfinished_before & files.names.keys()
        return {"open files": len(files.opened_by(self.process.name)) - 1, "unfinished files of an earlier life": len(left)}

    def _counts_of_sessions(self) -> dict[str, int]:
        if (sessions := self.service.engine.sessions) is None:
            return {}
        pool = sessions.pool
        return {
            "sessions": len(sessions),
            "owners": len(sessions._owners),
            "sequences": len(sessions._sequences),
            "bytes of pages": pool.used,
            "bytes of shared pages": pool.shared,
            "bytes of the pages of owners": sum(map(abs, pool.of_owner.values())),
        }

    def _tasks(self) -> list[str]:
        """The names of the coroutines of tasks that serve no purpose when all is quiet."""
        lasting = ("serve", "main", "recover", "_poll", "_sweep_regularly")  # server, lifespan, probe, folder, sessions
        tasks = asyncio.all_tasks(self.process.loop)
        names = [getattr(task.get_coro(), "__name__", "") for task in tasks if not task.done()]
        return [name for name in names if name not in lasting]

    def kept_tensors(self) -> int:
        """Number of calls whose tensors are still in memory, although they are answered."""
        return sum(reference() is not None for reference in self._tensors)


def kept_by(references: list[Any], describe: Callable[[Any], str] = repr) -> str:
    """What keeps the first object that is still there, for the report of a failure."""
    import gc

    alive = next((one for one in (reference() for reference in references) if one is not None), None)
    return "" if alive is None else ", ".join(sorted({type(one).__name__ for one in gc.get_referrers(alive)}))
