"""Private set intersection on a machine: folders on disk, files of ids, trials."""

from services.psi.disk import DiskFolder, FolderDamaged
from services.psi.files import read_ids

__all__ = ["DiskFolder", "FolderDamaged", "read_ids"]
