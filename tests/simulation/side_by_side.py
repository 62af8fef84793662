"""Several processes in one world. Each has its own event loop; they run one iteration of a loop at a time, in any order."""

import math
from collections.abc import Callable, Iterator

from simulation.process import Process, discard
from simulation.rules import Rules
from simulation.world import World

SETTLE_SECONDS = 400.0  # in which all must be quiet once the clients have finished


class Member(Process):
    """One of several processes. It is `ended` when it has exited or was killed."""

    ended = False
    hangs_until = 0.0  # until then it does not run
    exit_status: int | None = None

    def run(self) -> None:
        """Begin to serve."""
        self.rules = Rules(self, alone=False)
        self._serving = self.loop.create_task(self.serve())

    def must_accept(self) -> bool:
        return not self.ended and super().must_accept()

    def next_at(self) -> float:
        return max(self.loop.next_at(), self.hangs_until)

    def turn(self) -> None:
        """Run one iteration of its event loop."""
        try:
            with self.world.run_by(self.name):
                self.loop.turn()
        except SystemExit as exited:
            self.end(int(exited.code or 0))
            return
        self.rules.check()
        if self._serving.done():
            error = self._serving.exception()
            if error is not None:
                self.world.fail(error)
            self.end(0 if self.server.started else 3)

    def end(self, status: int) -> None:
        """The process has exited with this status, or was killed by the signal of the negative one."""
        if not self.ended:
            self.ended, self.exit_status = True, status
            self.world.note(self.name, "has ended with", status)
            self.listening.close()
            if status < 0:
                self.kill()
                self.bury()
            else:
                for transport in self.transports:
                    transport.die()
                discard(self.loop)
                if self.chosen.files is not None:
                    self.chosen.files.close_all(self.name)


def run_side_by_side(world: World, members: Callable[[], Iterator[Member]], finished: Callable[[], bool]) -> None:
    """Let the processes run until all is finished, or the run fails."""
    draw = world.random("turns")
    while not finished():
        due = min((member.next_at() for member in members()), default=math.inf)
        if not world.advance(None if math.isinf(due) else max(0.0, due - world.now)):
            return
        ready = [member for member in members() if member.next_at() <= world.now]
        if ready:
            draw.choice(ready).turn()
