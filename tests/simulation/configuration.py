"""What one seed chooses before a run: settings, scaled-down sizes, how long computing takes, and which faults occur.

Sizes that decide which path a request takes are drawn small, so that a body of some hundred bytes takes the path of one of megabytes.
"""

from dataclasses import dataclass, field
from typing import Any

from attend.limits import BatchLimits
from attend.serving.batching import limits_on
from attend.settings import Settings
from attend.spec import LayerSpec
from simulation.files import SimulatedFiles
from simulation.world import World

KEYS = ("ada", "grace", "emmy")  # callers with keys of their own
WIDTH, HEADS = 4, 2
# Without projections, keys of zeros make every visible row count equally: an output is the mean of the rows of values, which tells them.
PLAIN = LayerSpec(d_model=WIDTH, num_heads=HEADS, projections=False)
BATCHES_OF_A_GPU = BatchLimits(calls=4)
WINDOWED = LayerSpec(d_model=WIDTH, num_heads=HEADS, projections=False, window={"left": 5, "right": 0})
SIZES: dict[str, tuple[Any, ...]] = {  # module.NAME -> values; the last one is the real one
    "attend.serving.engine.INLINE_BYTES": (0, 300, 64 << 10),
    "attend.serving.scheduler.INLINE_OPERATIONS": (0, 2000, 1 << 24),
    "attend.serving.queueing.SIZE_CLASS_BOUNDS": ((0, 500, 2000, 8000), (1 << 24, 1 << 28, 1 << 32, 1 << 36)),
    "attend.serving.batching.MAX_EXAMINED": (1, 4096),
    "attend.serving.service.limits_on": (lambda device, calls: BATCHES_OF_A_GPU, limits_on),
    "attend.serving.scheduler.SWEEP_SHARE": (1, 16),
    "attend.serving.codec_pool.LARGE_BYTES": (500, 2000, 1 << 20),
    "attend.serving.figures.MAX_WAITING": (1, 32),
    "attend.serving.sessions.registry.SESSIONS_AT_ONCE": (1, 3, 100),
    "attend.serving.sessions.registry.MAX_SESSIONS": (2, 5, 10_000),
    "attend.serving.sessions.registry.MAX_ENDED": (1, 10_000),
    "attend.attention.cache.FIRST_ROWS": (1, 2, 16),
    "attend.attention.cache.PAGE_BYTES": (1, 100, 1 << 22),
    "attend.serving.layers.store.BLOCK_BYTES": (4, 64, 4096),
    "attend.web.connections.SEND_BYTES": (50, 400, 256 << 10),
    "attend.web.connections.TURN_BYTES": (100, 1600, 1 << 20),
    "attend.web.slow_peers.CHECKED_AT_ONCE": (1, 200),
    "attend.web.connections.WRITE_BUFFER_BYTES": (100, 64 << 10),
    "attend.web.replies.MAX_UNSPLIT_REPLY": (0, 200, 64 << 10),
    "attend.web.request_reader.UNCHECKED_BYTES": (0, 64 << 10),
    "uvicorn.protocols.http.httptools_impl.HIGH_WATER_LIMIT": (100, 64 << 10),
    "simulation.network.HIGH_WATER": (100, 64 << 10),
}


@dataclass
class Faults:
    """Probabilities of faults. They are 0 once the clients have finished, when the process must settle."""

    leaves: float = 0.0  # a client disconnects during a request
    stalls: float = 0.0  # a client stops to send or to read
    compute: float = 0.0  # computing a batch fails, or finds no memory
    files: float = 0.0  # a call to the file system fails
    memory: float = 0.0  # a job that reads or writes a body, or draws, finds no memory
    begun: bool = False  # whether computing and files may fail already: a process whose first calls fail does not start
    occurred: bool = False  # whether computing or a call to the file system has failed

    def stop(self) -> None:
        self.leaves = self.stalls = self.compute = self.files = self.memory = 0.0


@dataclass
class Preferences:
    """How much rather clients of the run do one thing than another. Each run leaves out some things and does others often, so what needs
    two rare things together happens in some runs (Groce et al., "Swarm testing", 2012)."""

    world: World
    equal: bool  # whether all things are as frequent as they are in other runs
    factors: dict[str, int] = field(default_factory=dict)

    def factor(self, name: str) -> int:
        """The factor on the weight of what has that name."""
        if self.equal:
            return 1
        if name not in self.factors:
            self.factors[name] = self.world.random(f"preference {name}").choice((0, 0, 1, 1, 1, 8))
        return self.factors[name]


@dataclass
class Configuration:
    """The choices of one seed."""

    settings: Settings
    sizes: dict[str, Any]
    faults: Faults
    clients: int
    actions: int  # of each client, at most
    theme: str | None  # what all clients prefer to do; None: each something else
    preferences: Preferences
    waits: tuple[float, ...]  # seconds between two actions of a client, if it waits
    compute_seconds: float  # mean, of a batch
    pauses: float
    kernel: int  # bytes that the operating systems buffer for a connection
    files: SimulatedFiles | None  # the folder of layers
    uses: tuple[str, ...]  # what clients do besides calls: sessions, layers, rpc
    kill_after: float | None  # mean seconds, or tenths of changes of files, after which the process is killed: each of its first lives
    stop_after: float | None  # seconds after which SIGTERM arrives while clients call; None: once they have finished
    alike: bool = False  # whether calls have equal numbers of queries and keys, and so may be computed together

    def prefer(self, situation: str | None) -> None:
        """Draw a part of the run again, so that a situation that needs several of its choices together is frequent."""
        if situation == "batches without memory":  # clients whose calls wait for a slow device, which computes them together
            self.sizes["attend.serving.scheduler.INLINE_OPERATIONS"] = 0
            self.sizes["attend.serving.service.limits_on"] = SIZES["attend.serving.service.limits_on"][0]
            self.compute_seconds, self.faults.compute = 0.3, 0.2
            self.clients, self.actions, self.uses, self.waits, self.alike = 8, 20, ("sessions",), (0.0,), True
            self.settings = self.settings.model_copy(update={"max_queue_bytes": 1 << 31, "session_memory": 1 << 20})
        elif situation == "crashes between changes" and self.files is not None:
            self.theme, self.uses, self.kill_after, self.actions = "layers", ("layers",), 6.0, 60
        elif situation == "pipelines that stop":  # requests that are computed while a later one of their connection does not arrive
            self.sizes["attend.serving.scheduler.INLINE_OPERATIONS"] = 0
            self.compute_seconds, self.faults.stalls, self.waits = 0.3, 0.2, (0.0,)
            self.settings = self.settings.model_copy(update={"client_timeout": 1.0, "request_timeout": None, "max_queue_bytes": 1 << 31})
            self.theme, self.preferences.equal = "calls", False
            self.preferences.factors["several_at_once"] = 8
        elif situation == "steps whose callers leave":  # and which then fail
            self.sizes["attend.serving.scheduler.INLINE_OPERATIONS"] = 0
            self.compute_seconds, self.faults.compute, self.faults.leaves = 0.3, 0.2, 0.2
            self.settings = self.settings.model_copy(update={"grpc_port": 9000, "session_memory": 1 << 20, "max_queue_bytes": 1 << 31})
            self.theme, self.uses = "rpc", ("rpc",)


def draw_configuration(world: World, keys_file: Any) -> Configuration:
    """The configuration of a world's seed. `keys_file`: the file with the keys of KEYS."""

    def one(name: str, *values: Any) -> Any:
        """One of the values. Each choice has a generator of its own, so a new one leaves the others as they were."""
        return world.random(f"configuration {name}").choice(values)

    def often(name: str, values: tuple[Any, ...]) -> Any:
        """One of the values; in two fifths of the runs the last one."""
        return one(name, *values) if one(f"{name} at all", True, True, True, False, False) else values[-1]

    settings = Settings(
        port=8000,
        d_model=WIDTH,
        num_heads=HEADS,
        layers={"plain": PLAIN, "windowed": WINDOWED},
        access_log=False,
        keys_file=one("keys", keys_file, None),
        request_timeout=one("request_timeout", None, None, 2.0),
        client_timeout=one("client_timeout", 1.0, 5.0, 20.0),
        min_client_rate=one("min_client_rate", 1, 100),
        keepalive_timeout=one("keepalive_timeout", 0.5, 75.0),
        drain_seconds=one("drain_seconds", 0.0, 0.3, 5.0),
        compress_replies=one("compress_replies", False, False, False, True),
        grpc_port=one("grpc_port", 9000, None),
        session_memory=one("session_memory", 600, 3000, 1 << 20),
    )
    settings = settings.model_copy(update={"max_queue_bytes": one("max_queue_bytes", 4000, 40_000, 1 << 31)})  # below the least setting
    sizes = {name: often(name, values) for name, values in SIZES.items()}
    faults = Faults(*(one(name, 0.0, 0.02, 0.2) for name in ("leaves", "stalls", "compute")), one("file faults", 0.0, 0.0, 0.01, 0.1))
    faults.memory = one("memory", 0.0, 0.0, 0.02, 0.2)
    files = None
    if one("files", True, True, False):
        block = sizes["attend.serving.layers.store.BLOCK_BYTES"]
        files = SimulatedFiles(world, block, faults)
        settings = settings.model_copy(update={"layers_dir": files.path})
    chosen = Configuration(
        settings,
        sizes,
        faults,
        clients=one("clients", *range(1, 9)),
        actions=one("actions", 3, 20, 60),
        theme=one("theme", None, None, "calls", "sessions", "layers", "rpc"),
        preferences=Preferences(world, one("preferences", False, False, True)),
        waits=one("waits", (0.001, 0.05, 1.0), (0.001, 0.05, 1.0), (0.0,), (0.05, 3.0, 30.0)),
        compute_seconds=one("compute_seconds", 0.0, 1e-4, 1e-2, 0.3),
        pauses=one("pauses", 0.0, 0.0, 0.001),
        kernel=one("kernel", 150, 2000, 1 << 18),
        files=files,
        uses=("sessions", "layers", "rpc"),
        kill_after=one("kill_after", None, None, None, 0.3, 2.0, 30.0),
        stop_after=one("stop_after", None, None, None, None, None, 0.1, 1.0, 1.3, 2.0, 4.0),
    )
    chosen.prefer(one("situation", None, None, None, None, "batches without memory", "crashes between changes"))
    chosen.prefer(one("another situation", *[None] * 6, "pipelines that stop", "steps whose callers leave"))
    return chosen
