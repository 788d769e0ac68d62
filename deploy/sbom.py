#!/usr/bin/python3
"""What an image is made of, as SPDX 2.3 in JSON: qkvd, and the Debian packages of a dpkg status file.

Usage: deploy/sbom.py --name NAME --version VERSION --revision REVISION [--status FILE] [--only FILE] >NAME.spdx.json
"""

import argparse
import datetime
import hashlib
import json
import os
import pathlib
import re
import sys
import urllib.parse

FIELDS = {"Package", "Status", "Version", "Architecture", "Source", "Maintainer", "Homepage"}


def installed(status):
    """Stanzas of packages that are installed, by name."""
    found = {}
    for stanza in status.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if line.partition(": ")[0] in FIELDS)
        if fields.get("Status", "").endswith(" installed"):
            found[fields["Package"]] = fields
    return found


def identifier(name):
    return "SPDXRef-Package-" + re.sub(r"[^A-Za-z0-9.-]", "-", name)


def package(fields):
    name, version = fields["Package"], fields["Version"]
    place = f"pkg:deb/debian/{name}@{urllib.parse.quote(version, safe='.~-')}?arch={fields['Architecture']}&distro=debian-12"
    return {
        "SPDXID": identifier(name), "name": name, "versionInfo": version, "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False, "licenseConcluded": "NOASSERTION", "licenseDeclared": "NOASSERTION",
        "copyrightText": "NOASSERTION", "supplier": f"Organization: {fields.get('Maintainer', 'Debian').split(' <')[0]}",
        "sourceInfo": f"built from {fields.get('Source', name)}",
        "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": place}],
    }


def document(given, packages):
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    own = {
        "SPDXID": "SPDXRef-Package-qkvd-itself", "name": "qkvd", "versionInfo": f"{given.version}+{given.revision}",
        "downloadLocation": "NOASSERTION", "filesAnalyzed": False, "licenseConcluded": "Apache-2.0",
        "licenseDeclared": "Apache-2.0", "copyrightText": "NOASSERTION", "primaryPackagePurpose": "APPLICATION",
    }
    content = [own, *(package(packages[name]) for name in sorted(packages))]
    unique = hashlib.sha256(json.dumps([given.name, content]).encode()).hexdigest()
    return {
        "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT", "name": given.name,
        "documentNamespace": f"https://qkvd.invalid/spdx/{given.name}-{unique}",
        "creationInfo": {
            "created": datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "creators": ["Tool: qkvd-sbom"],
        },
        "packages": content,
        "relationships": [{"spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES",
                           "relatedSpdxElement": own["SPDXID"]}]
        + [{"spdxElementId": own["SPDXID"], "relationshipType": "DEPENDS_ON", "relatedSpdxElement": identifier(name)}
           for name in sorted(packages)],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", required=True, help="of the image")
    parser.add_argument("--version", required=True, help="of qkvd")
    parser.add_argument("--revision", required=True, help="of its sources")
    parser.add_argument("--status", default="/var/lib/dpkg/status", type=pathlib.Path, help="dpkg's list of packages")
    parser.add_argument("--only", type=pathlib.Path, help="a file with the packages that are meant, one a line")
    given = parser.parse_args()
    packages = installed(given.status.read_text())
    if given.only:
        names = given.only.read_text().split()
        unknown = [name for name in names if name not in packages]
        if unknown:
            sys.exit(f"sbom.py: not installed: {' '.join(unknown)}")
        packages = {name: packages[name] for name in names}
    json.dump(document(given, packages), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
