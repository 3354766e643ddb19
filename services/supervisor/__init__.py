from services.supervisor.folder import AlreadyRunning, ChildState, RunFolder, SupervisorState
from services.supervisor.plan import ChildSpec, plan
from services.supervisor.regions import Region, Wanted
from services.supervisor.restarts import RestartPolicy
from services.supervisor.supervisor import NotReady, Supervisor
from services.supervisor.up import supervised

__all__ = [
    "AlreadyRunning",
    "ChildSpec",
    "ChildState",
    "NotReady",
    "Region",
    "RestartPolicy",
    "RunFolder",
    "Supervisor",
    "SupervisorState",
    "Wanted",
    "plan",
    "supervised",
]
