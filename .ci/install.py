"""Install command of the test environments: see one shared installation of torch where it exists, then call pip.

Without the shared environment pip installs torch into this one, so that each environment also works alone.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

shared = Path(os.environ["MIXLE_SHARED"])
site = next(iter(shared.glob("lib/python3*/site-packages")), None)
here = Path(sysconfig.get_paths()["purelib"])
if site is not None and (site / "torch").is_dir() and site != here:
    (here / "shared_torch.pth").write_text(f"{site}\n")
sys.exit(subprocess.call([sys.executable, "-I", "-m", "pip", "install", *sys.argv[1:]]))
