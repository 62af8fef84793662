"""Routes requests of Ray's proxy to the replica that has their session, as a gateway does: see "Several replicas with sessions" in
`docs/deployment.md`."""

import pickle
import random
import re
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from attend.deploy.routing import replica_of

SESSION_PATH = re.compile(r"/sessions/([^/]+)")
SESSION_HEADER = b"x-attend-session"


class SessionRouter(RequestRouter):  # type: ignore[misc]  # Ray has no annotations here
    """The id of a session names its replica (`--replica-name`, which is Ray's id of the replica). Another text in the header chooses one of
    the replicas by its hash. Without either, a request goes to the less busy of two replicas, as with Ray's own router."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas among which Ray takes the least busy one; none if there are none."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas] if candidate_replicas else []
        pending_request.routing_context.should_backoff = True  # wait before the next attempt if all are busy
        text = _session_of(pending_request.args)
        names = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if (name := replica_of(text, names)) is not None:
            return [[names[name]]]
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]


def _session_of(args: Sequence[Any]) -> str:
    """The id of a session in the path of an HTTP request, else the text in its header; "" if there is none."""
    if len(args) != 1 or not isinstance(args[0], bytes):
        return ""
    scope = pickle.loads(args[0]).asgi_scope  # Ray's proxy has pickled it in this process, for the replica
    found = SESSION_PATH.search(scope["path"])
    return found[1] if found else dict(scope["headers"]).get(SESSION_HEADER, b"").decode("latin-1")
