"""Whether a path is on a network file system, where SQLite's locks do not hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

MOUNTS: Final = Path("/proc/self/mounts")

_NETWORK: Final = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "pvfs2",
        "smb3",
        "smbfs",
        "wekafs",
        "fuse.blobfuse",
        "fuse.blobfuse2",
        "fuse.ceph",
        "fuse.gcsfuse",
        "fuse.glusterfs",
        "fuse.goofys",
        "fuse.juicefs",
        "fuse.mount-s3",
        "fuse.mountpoint-s3",
        "fuse.rclone",
        "fuse.s3fs",
        "fuse.seaweedfs",
        "fuse.sshfs",
    }
)


def network_file_system(path: Path, mounts: Path = MOUNTS) -> str | None:
    """The type of the network file system that the resolved `path` is on, such as "nfs4".

    None for a local disk, and on systems that have no list of mounts (Linux has one).
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    best, kind = -1, ""
    for line in lines:
        _, point, found, *_ = line.split(" ")
        mount = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point))
        # The last of several mounts at one point covers the others.
        if path.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), found
    return kind if kind in _NETWORK else None
