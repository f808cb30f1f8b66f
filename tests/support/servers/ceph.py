"""Ceph's S3 gateway on a cluster of one: monitor, manager, one disk, gateway.

The order of a start: keys and maps are made offline, the monitor comes up with all of them, the
disk is registered and made, then the gateway creates its pools on it. The gateway stops first
and the monitor last, because a disk that cannot say goodbye to its monitor waits for it.
"""

import base64
import os
import struct
import time
import uuid

from tests.support.servers.base import HOST, INSTALL_HINT, free_port, http_status
from tests.support.servers.lookup import find_program, missing_programs, program_version
from tests.support.servers.s3 import S3Server

PROGRAMS = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-mgr", "ceph-osd")

# One copy of everything, few placement groups, and no worry about how full the machine's disk is.
CONFIG = """\
[global]
fsid = {fsid}
mon_host = {monitor}
public_addr = {host}
cluster_addr = {host}
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
auth_allow_insecure_global_id_reclaim = false
keyring = {directory}/keyring
run_dir = {directory}
admin_socket = {directory}/$name.asok
pid_file =
log_file = {directory}/$name.log
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pgp_num = 8
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
osd_class_load_list = *
osd_class_default_list = *
osd_objectstore = bluestore
osd_memory_target = 939524096
bluestore_block_size = 10737418240
bluestore_fsck_on_mkfs = false
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
mon_data_avail_crit = 1
mon_data_avail_warn = 2
mgr_initial_modules =
paxos_propose_interval = 0.05
[mon.a]
mon_data = {directory}/mon
mon_initial_members = a
[mgr.x]
mgr_data = {directory}/mgr
[osd.0]
osd_data = {directory}/osd
[client.rgw.a]
rgw_data = {directory}/rgw
rgw_frontends = beast endpoint={host}:{port}
rgw_enable_usage_log = false
rgw_enable_ops_log = false
"""

ALL = "allow *"
CAPABILITIES = {
    "mon.": {"mon": ALL},
    "client.admin": {"mon": ALL, "osd": ALL, "mgr": ALL},
    "client.rgw.a": {"mon": ALL, "osd": ALL, "mgr": ALL},
    "mgr.x": {"mon": "allow profile mgr", "osd": ALL},
    "osd.0": {"mon": "allow profile osd", "mgr": "allow profile osd", "osd": ALL},
}


class Ceph(S3Server):
    """Ceph RGW, the most production-like of the S3 servers."""

    name = "ceph"
    start_timeout_s = 240.0

    def available(self) -> str | None:
        """Needs the programs of five Debian packages."""
        missing = missing_programs(*PROGRAMS)
        return f"{missing} ({INSTALL_HINT})" if missing else None

    def version(self) -> str | None:
        """Version that the gateway prints."""
        return program_version(find_program("radosgw"))

    def bring_up(self) -> None:
        """The steps from an empty directory to a gateway with a user."""
        disk_id = str(uuid.uuid4())
        self._write_config()
        self._make_monitor()
        self._daemon("ceph-mon", "a")
        self._daemon("ceph-mgr", "x")
        self._ceph("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk_id, "--no-mon-config")
        self._ceph("ceph", "--connect-timeout", "60", "osd", "new", disk_id)
        self._daemon("ceph-osd", "0")
        self._daemon("radosgw", "client.rgw.a", flag="-n")
        self.wait_until(lambda: http_status(self.address) is not None, self.start_timeout_s)
        keys = [f"--access-key={self.access_key}", f"--secret-key={self.secret_key}"]
        self._ceph("radosgw-admin", "user", "create", "--uid=reef", "--display-name=reef", *keys)

    def _write_config(self) -> None:
        self._fsid = str(uuid.uuid4())
        self._monitor = f"[v2:{HOST}:{free_port()},v1:{HOST}:{free_port()}]"
        values = {"fsid": self._fsid, "monitor": self._monitor, "host": HOST, "port": self.port}
        config = CONFIG.format(directory=self.directory, **values)
        (self.directory / "ceph.conf").write_text(config)
        keyring = "".join(keyring_entry(name, caps) for name, caps in CAPABILITIES.items())
        (self.directory / "keyring").write_text(keyring)
        for folder in ("mgr", "osd", "rgw"):
            (self.directory / folder).mkdir()

    def _make_monitor(self) -> None:
        """The monitor's store starts with every key, so that none has to be added later."""
        monmap, keyring = self.directory / "monmap", self.directory / "keyring"
        made = ["--create", "--fsid", self._fsid, "--addv", "a", self._monitor, monmap]
        self.run([find_program("monmaptool"), *made])
        self._ceph("ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", keyring)

    def _ceph(self, program: str, *words) -> None:
        self.run([find_program(program), "-c", self.directory / "ceph.conf", *words])

    def _daemon(self, program: str, identity: str, flag: str = "-i") -> None:
        config = self.directory / "ceph.conf"
        argv = [find_program(program), "-c", config, flag, identity, "-f"]
        self.launch(argv, log=f"{program}.out")


def keyring_entry(name: str, capabilities: dict[str, str]) -> str:
    """A keyring section with a new key: type, time and length before the secret's 16 bytes."""
    header = struct.pack("<HIIH", 1, int(time.time()), 0, 16)
    key = base64.b64encode(header + os.urandom(16)).decode()
    caps = "".join(f'\tcaps {service} = "{rule}"\n' for service, rule in capabilities.items())
    return f"[{name}]\n\tkey = {key}\n{caps}"
