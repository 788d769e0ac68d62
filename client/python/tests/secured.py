"""A daemon that asks for client certificates and knows tokens, as `deploy/compose/authority.sh` makes them."""

import os
import subprocess

from daemon import Daemon, binary

import qkvd

AUTHORITY = os.path.join(os.path.dirname(__file__), "..", "..", "..", "deploy", "compose", "authority.sh")


class Secured(Daemon):
    """Mutual TLS on its TCP port, and an auth-file. `tls` and a connector's `settings` are of a client of team-a."""

    def __init__(self, folder, *arguments):
        self.files = str(folder)
        subprocess.run([AUTHORITY, "--dir", self.files, "--client", "worker=team-a"], check=True, capture_output=True)
        made = subprocess.run([binary("qkvctl"), "token", "new", "team-a"], check=True, capture_output=True, text=True)
        self.token, line = made.stdout.splitlines()
        with open(self.file("tokens"), "w") as file, open(self.file("daemon/clients")) as clients:
            file.write(f"{clients.read()}{line}\n")
        with open(self.file("token"), "w") as file:
            file.write(self.token + "\n")
        super().__init__(
            "--tls-cert", self.file("daemon/daemon.pem"), "--tls-key", self.file("daemon/daemon.key"), "--tls-client-ca",
            self.file("authority.pem"), "--auth-file", self.file("tokens"), *arguments,
        )  # fmt: skip
        self.tls = qkvd.Tls(ca=self.file("authority.pem"), certificate=self.file("worker.pem"), key=self.file("worker.key"))
        # As strings: engines have them in JSON.
        self.settings = {
            "target": self.tcp, "tls_ca": self.file("authority.pem"), "tls_cert": self.file("worker.pem"),
            "tls_key": self.file("worker.key"),
        }  # fmt: skip

    def file(self, name):
        """Its path."""
        return os.path.join(self.files, name)
