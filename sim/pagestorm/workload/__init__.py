"""What arrives at a server: when, how long, and from which seed."""

from pagestorm.workload.drafts import Draft, Workload, stream
from pagestorm.workload.streams import substream

__all__ = ["Draft", "Workload", "stream", "substream"]
