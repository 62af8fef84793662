"""The bugs that mutants.py plants: name -> (module, lines, lines in their place). Those of the past have a comment."""

SCHEDULER, BATCHING, CODECS = "attend.serving.scheduler", "attend.serving.batching", "attend.serving.codec_pool"
SESSIONS, LOCKS, TRANSFER = "attend.serving.sessions.registry", "attend.serving.sessions.locks", "attend.serving.sessions.transfer"
CACHE, BUDGET, REPLIES = "attend.attention.cache", "attend.serving.byte_budget", "attend.web.replies"
CONNECTIONS, SIGNALS, FIGURES = "attend.web.connections", "attend.cli.signals", "attend.serving.figures"
STORE, LOADER, PROCESSES = "attend.serving.layers.store", "attend.serving.layers.loader", "attend.cli.processes"

MUTANTS: dict[str, tuple[str, str, str]] = {
    # past: the error of a picture, and of a call without memory, and of a batch that fails, kept the tensors (found by the simulation)
    "cycle of a picture": (
        FIGURES,
        """                async with asyncio.timeout(deadline - self.clock()):
                    return await asyncio.get_running_loop().run_in_executor(self._thread, self._draw, drawing, deadline, request.gone)
""",
        """                drawn = asyncio.get_running_loop().run_in_executor(self._thread, self._draw, drawing, deadline, request.gone)
                return await asyncio.wait_for(drawn, max(0.0, deadline - self.clock()))
""",
    ),
    "cycle of an inline call": (SCHEDULER, "            del outcome  # an error's traceback refers to this frame;", "            pass  #"),
    # past: the frames of a cancelled stream kept its calls, and in Python 3.11 for ever (found by the simulation)
    "cycle of a stream that is cancelled": ("attend.serving.streams", "error.with_traceback(None) from None", "error"),
    "cycle of a failed batch": ("attend.serving.faults", "error.with_traceback(None)", "error"),
    # past: a job in a frame of its own exception's traceback
    "cycle of a waiting call": (SCHEDULER, "            del job, future  # which have an error", "            pass  #"),
    # past: exports were computed before their bytes were admitted, and for callers who had left
    "export without lease": (TRANSFER, "            request.lease.add(session.cache.size)\n", "            pass\n"),
    "work for callers who left": (
        "attend.serving.engine",
        "        request.check_caller(self.clock())\n        return function",
        "        return function",
    ),
    # past: a session ended between two awaits of a call to it
    "KeyError between two awaits": (
        SESSIONS,
        "        session.calls -= 1\n        if session.id in self._sessions:",
        "        session.calls -= 1\n        if session.used_at is not None:",
    ),
    # past: one call without memory too many, and the server was not ready for ever
    "readiness latch": (
        SCHEDULER,
        "self.out_of_memory + 1 if isinstance(outcome, OutOfMemory) else 0",
        "self.out_of_memory + 1 if isinstance(outcome, OutOfMemory) else self.out_of_memory",
    ),
    # past: a check of the device that ended at the moment at which its caller was cancelled went on, and so did its stream of health
    # (found by the simulation)
    "cancellation that is ignored": (
        "attend.serving.probe",
        "            async with asyncio.timeout(self.timeout):  # asyncio.wait_for of Python 3.11 may ignore that its caller is cancelled\n"
        "                await self._submit_zeros(layer, 1)\n",
        "            await asyncio.wait_for(self._submit_zeros(layer, 1), self.timeout)\n",
    ),
    "double settle": (BATCHING, "if self.future is None or self.future.done():", "if self.future is None:"),
    "lease released twice": (
        REPLIES,
        "                request.lease.resize(0)\n",
        "                request.lease.budget.held -= request.lease.held\n                request.lease.resize(0)\n",
    ),
    "lease kept when the caller leaves": (
        REPLIES,
        "            if request.lease is not None:\n                request.lease.resize(0)",
        "            if request.lease is not None and request.status:\n                request.lease.resize(0)",
    ),
    "lost wake-up of the device": (
        SCHEDULER,
        "            job.settle(outcome)\n        self._schedule_batch(loop)\n",
        "            job.settle(outcome)\n",
    ),
    "lost wake-up of a codec thread": (
        CODECS,
        "item.future.set_exception(error)\n        self.start(loop)\n",
        "item.future.set_exception(error)\n",
    ),
    "thread taken for nothing": (CODECS, "            self.free -= 1\n", "            self.free -= item.size % 7 > 0\n"),
    "drain forces the exit": (
        SIGNALS,
        "        self.stop(signal.SIGTERM, None)\n",
        "        self.stop(signal.SIGTERM, None)\n        self.stop(signal.SIGINT, None)\n",
    ),
    "second signal in the drain": (
        SIGNALS,
        "        if self.service.draining or not self.drain_seconds:",
        "        if self.drain_seconds:",
    ),
    "shared page freed once too often": (
        CACHE,
        "copy._pages = [self.pool.share(page) for page in self._pages if page.start < length]",
        "copy._pages = [self.pool.share(page) if page.stop <= length else page for page in self._pages if page.start < length]",
    ),
    "write to a shared page": (CACHE, "if page is None or page.caches > 1 or page.stop", "if page is None or page.stop"),
    "page freed before its window has passed": (
        CACHE,
        "first_visible(self.spec, self.length)",
        "first_visible(self.spec, self.length + 3)",
    ),
    "failed step keeps its rows": (LOCKS, "            session.cache.truncate(length)  # also", "            session.cache.length  # also"),
    "length not checked": (
        "attend.serving.sessions.session",
        "if expected is not None and expected != self.length:",
        "if expected is not None and expected > self.length:",
    ),
    "calls to a session together": (
        LOCKS,
        "                await session.lock.acquire()\n",
        "                session.lock = asyncio.Lock()\n                await session.lock.acquire()\n",
    ),
    "deadline of a step that is computed": (
        SCHEDULER,
        "            if job.is_computing and job.timer is not None:",
        "            if job.is_computing and job.timer is None:",
    ),
    "another owner's session": (
        SESSIONS,
        """            self._follow_layer(session)
        if (session := self._sessions.get(session_id)) is not None and session.owner == owner:""",
        """            self._follow_layer(session)
        if (session := self._sessions.get(session_id)) is not None:""",
    ),
    "session evicted while in use": (
        SESSIONS,
        "            owned.unused.pop(session.id, None)\n            owned.in_use[session.id] = session",
        "            owned.in_use[session.id] = session",
    ),
    "session that is idle too soon": (
        SESSIONS,
        "if session.used_at + session.idle_seconds <= now:",
        "if session.used_at + session.idle_seconds / 2 <= now:",
    ),
    "sweep that never starts again": (
        SESSIONS,
        "            await asyncio.sleep(SWEEP_SECONDS)\n        self._sweeping = None\n",
        "            await asyncio.sleep(SWEEP_SECONDS)\n",
    ),
    "pages without a bound": (
        SESSIONS,
        "        if self._shortage(cache.owner, cache.missing_bytes(stop)) is not None:\n            await",
        "        if False:\n            await",
    ),
    "pages kept after an import": (TRANSFER, "        finally:\n            cache.close()\n", "        finally:\n            pass\n"),
    "expired call stays in the queue": (
        SCHEDULER,
        "        if job in self._queue:\n            self._remove([job])\n        job.settle(DeadlinePassed",
        "        job.settle(DeadlinePassed",
    ),
    "abandoned calls are computed": (
        BATCHING,
        "        if job.is_abandoned():\n            abandoned.append(job)\n        elif",
        "        if",
    ),
    "half of a split batch is lost": (
        "attend.serving.executor",
        "(batch[:middle], batch[middle:])",
        "(batch[:middle], batch[middle + 1 :])",
    ),
    "memory of the queue not given back": ("attend.serving.queueing", "        self.memory_bytes.give_back(flow, cost.memory_bytes)\n", ""),
    "callers without bytes are kept": (
        BUDGET,
        "        if own:\n            budget._taken[caller] = own\n        elif taken:\n            del budget._taken[caller]",
        "        budget._taken[caller] = own",
    ),
    "bound of bytes not checked": (
        BUDGET,
        "            if free < 0 or own > budget.times * free:",
        "            if free < 0 and own > budget.times * free:",
    ),
    "picture that fails is counted for ever": (
        "attend.serving.fair_share",
        "        try:\n            yield\n        finally:\n            self.give_back(caller, 1)\n",
        "        yield\n        self.give_back(caller, 1)\n",
    ),
    "end of a long reply": (CONNECTIONS, "more or start + SEND_BYTES < len(whole)})", "more or start + SEND_BYTES <= len(whole)})"),
    "slow peers checked once": ("attend.web.slow_peers", "        self._running = bool(connections)\n", "        self._running = False\n"),
    "removed layer stays": (
        "attend.serving.layers.registry",
        '        """Remove the layer of that name, unloaded or not."""\n        self._layers.pop(name, None)',
        '        """Remove the layer of that name, unloaded or not."""',
    ),
    "cached validation of another step": (
        "attend.serving.sessions.steps",
        'return None if key is None else ("step", options.append, key)',
        'return None if key is None else ("step", key)',
    ),
    # past: a request that was answered before its body was complete got a 408 later (found by the simulation)
    "408 after the answer": (CONNECTIONS, "if self.cycle.response_complete and not self.transport", "if False and not self.transport"),
    "application that is not told of a refusal": (
        CONNECTIONS,
        "                self.cycle.disconnected = True\n                self.cycle.message_event.set()\n",
        "                pass\n",
    ),
    # past: a request that was answered before its body, and then stopped in it, got a 408 too (found by the simulation)
    "408 for the rest of a body": (CONNECTIONS, "(self._in_body or not self._received)", "(False or not self._received)"),
    # past: a client that read the replies to several requests was cut off, if some bytes always waited (found by the simulation)
    "replies that are no progress": (CONNECTIONS, "(PeerState.REPLY, self._replies)", "(PeerState.REPLY, cycle)"),
    # past: a request that was computed was cut off with a later one of its connection that stopped in its body (found by the simulation)
    "cut off with a slow request behind it": (CONNECTIONS, "        if self._refusal_reply:\n", "        if False:\n"),
    # past: nobody looked at the error of a step whose caller had left, so asyncio logged it (found by the simulation)
    "error that nobody looks at": (SCHEDULER, "            future.add_done_callback(_retrieve)\n", ""),
    "file of a layer not flushed": (STORE, "        os.fsync(file)\n        stamp", "        stamp"),
    "folder not flushed after a change": (STORE, "unlink(missing_ok=True)\n            _flush(self.path)\n", "unlink(missing_ok=True)\n"),
    "part of a file written": (
        STORE,
        "            while rest:\n                rest = rest[os.write(file, rest) :]\n",
        "            os.write(file, rest)\n",
    ),
    "file written in place": (
        STORE,
        'self._path(layer.name), self.path / f".{layer.name}.{token_hex(8)}{TEMPORARY}"',
        "self._path(layer.name), self._path(layer.name)",
    ),
    "no space reserved": (STORE, "        reserve()\n        temporary", "        temporary"),
    "unfinished files kept": (STORE, '        for path in self.path.glob(f".*{TEMPORARY}"):\n            _remove_unlocked(path)\n', ""),
    "claim kept after a failure": (
        LOADER,
        "            _submit(self._folder_thread, lambda: _submit(self._thread, claim.release))\n",
        "",
    ),
    "acknowledged before it is stored": (
        LOADER,
        "                change = await self._run_on_folder(self.store.remove, name)\n",
        "                _submit(self._thread, lambda: self.store.remove(name))\n",
    ),
    # past: a process could not start on a full disk (found by the simulation)
    "start on a full disk": (
        STORE,
        "                if error.errno not in DISK_FULL_ERRORS:\n                    raise\n",
        "                raise\n",
    ),
    # past: a file was written to on the event loop (found by the simulation)
    "acknowledged on the loop": (
        LOADER,
        "await self._run_on_folder(store.coordinator.acknowledge, changes)",
        "store.coordinator.acknowledge(changes)",
    ),
    # past: a worker that could not load a layer for a moment acknowledged the change, and never had the layer (found by the simulation)
    "acknowledged although a layer is not loaded": (LOADER, "            if not self._retries:\n", "            if True:\n"),
    "layer that is not tried again": (LOADER, "                self._forget_file(name, before)\n", ""),
    "dead worker that is waited for": (
        STORE,
        "if path != self._path and not _remove_unlocked(path)",
        "if path != self._path",
    ),
    "worker that ends before the new one is ready": (PROCESSES, "if not self._becomes_ready(new):", "if False:"),
    "supervisor that waits for hanging workers": (PROCESSES, "worker.process.join(max(0.0, deadline - time.monotonic()))", "worker.join()"),
    "router that forgets replicas": ("attend.deploy.routing", "return name if name in names else None", "return None"),
    "restart that is taken for an invented id": (SESSIONS, "        if process != own:\n", "        if False:\n"),
    "dead worker that is not replaced": (PROCESSES, "                self._end_worker(worker)\n", "                pass\n"),
    # past: an eviction looked at all sessions for each one that it ended; a full queue was swept for each call
    "eviction that looks at all sessions": (
        SESSIONS,
        "*(session.cache for session in owned.in_use.values())",
        "*(session.cache for session in owned.sessions.values() if session.calls)",
    ),
    "ids of all sessions for each call": (
        SESSIONS,
        """        if (session := self._sessions.get(session_id)) is not None and session.owner == owner:
            self._follow_layer(session)""",
        """        ",".join(self._sessions)
        if (session := self._sessions.get(session_id)) is not None and session.owner == owner:
            self._follow_layer(session)""",
    ),
    "queue that is swept for each call": (
        SCHEDULER,
        "        if self._occupancy.refusal(job.flow, job.prepared.cost) is None:\n            return\n",
        "        self._arrivals = len(self._queue)\n",
    ),
    "layer that is compared with all others": (
        "attend.serving.layers.registry",
        "        others = self._all_parameters - self._parameters.get(name, 0)\n",
        "        others = sum(layer.spec.num_parameters for layer in self._layers.values() if layer.name != name)\n",
    ),
    # past: a check of readiness sorted all layers (found by the count of work)
    "layers that each check of readiness sorts": (
        "attend.serving.layers.registry",
        "return next(iter(self._layers.values()), None)",
        "return min(((layer.name, layer) for layer in self._layers.values()), default=(None, None))[1]",
    ),
    # past: the index of models was made on the event loop
    "index of models on the loop": (
        "attend.web.v2.routes",
        "await request.service.engine.run(request, MODEL_BYTES * len(layers), text)",
        "text()",
    ),
    "all connections in one iteration": ("attend.web.slow_peers", "list(islice(unchecked, CHECKED_AT_ONCE))", "list(unchecked)"),
}
RUN = {  # those that the seeds of one process do not show, with what does
    "acknowledged although a layer is not loaded": ("--of", "workers"),
    "layer that is not tried again": ("--of", "workers"),
    "dead worker that is waited for": ("--of", "workers"),
    "worker that ends before the new one is ready": ("--of", "workers"),
    "supervisor that waits for hanging workers": ("--of", "workers"),
    "dead worker that is not replaced": ("--of", "workers"),
    "router that forgets replicas": ("--of", "replicas"),
    "restart that is taken for an invented id": ("--of", "replicas"),
    "eviction that looks at all sessions": ("growth", "a step that ends another session", "sessions"),
    "ids of all sessions for each call": ("growth", "fork a session", "sessions"),
    "layers that each check of readiness sorts": ("growth", "ready", "layers"),
    "queue that is swept for each call": ("growth", "a call that waits", "waiting calls"),
    "layer that is compared with all others": ("growth", "put a layer", "layers"),
    "index of models on the loop": ("growth", "index of models", "layers"),
    "all connections in one iteration": ("growth", "a second without calls", "connections"),
}
