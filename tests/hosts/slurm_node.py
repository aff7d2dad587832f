"""A node of a Slurm cluster: the first process of a host, which runs the daemons and commands.

`python slurm_node.py FOLDER` runs the shell commands that are put into FOLDER/HOST/do, one after
another, and writes what each one says to `said`.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

_POLL_S = 0.05


def main() -> None:
    folder, host = Path(sys.argv[1]), socket.gethostname()
    own = folder / host
    munge = Path("/run/munge")  # of this host: /run is its own
    munge.mkdir(mode=0o755)
    shutil.copyfile(folder / "munge.key", munge / "key")
    (munge / "key").chmod(0o600)
    places = {"key-file": "key", "socket": "munge.socket.2", "pid-file": "pid"}
    places |= {"log-file": "log", "seed-file": "seed"}
    options = [f"--{name}={munge / file}" for name, file in places.items()]
    subprocess.run(["munged", "--force", *options], check=True)
    Path("/run/slurmd").mkdir()
    daemons = ["slurmctld", "slurmd"] if host == "host0" else ["slurmd"]
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    for name in daemons:
        with (own / name).open("wb") as log:
            subprocess.Popen([name, "-D"], stdout=log, stderr=log)
    while True:
        asked = own / "do"
        while not asked.exists():
            time.sleep(_POLL_S)
        command = asked.read_text()
        asked.unlink()
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        incoming = own / ".said"
        incoming.write_text(f"{done.returncode}\n{done.stdout}{done.stderr}")
        incoming.replace(own / "said")


if __name__ == "__main__":
    main()
