"""What a server's command line says of media."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msaserve.gateway.media.pipeline import MediaPipeline


@dataclass(frozen=True)
class MediaOptions:
    media_hosts: tuple[str, ...] = ()
    """Fetch pictures and clips from these hosts and the ones below them only. Default: from any public one."""
    media_private_hosts: bool = False
    """Fetch from private and loopback addresses too: for closed networks."""
    media_processes: int | None = None
    """Processes that decode pictures and clips. Default: one per core."""

    def pipeline(self, checkpoint: Path, *, share: int = 1) -> MediaPipeline | None:
        """For a checkpoint directory (its small files are enough); None if no spec takes it.

        share: of how many gateway processes this is one: each has a part of what all may hold.

        Raises:
            CheckpointError: its configuration cannot be read.
        """
        from msaserve.gateway.media.limits import MediaLimits
        from msaserve.gateway.media.pipeline import MediaPipeline
        from msaserve.gateway.media.pool import num_cores
        from msaserve.gateway.media.spec import find_spec

        source = find_spec(checkpoint)
        if source is None:
            return None
        return MediaPipeline(
            source,
            MediaLimits().shared(share),
            allowed_hosts=self.media_hosts or None,
            allows_private=self.media_private_hosts,
            num_processes=-(-(self.media_processes or num_cores()) // share),
        )
