"""Prints what an installed package requires here, one requirement a line: requirements_of.py PACKAGE [EXCEPT ...]"""

import importlib.metadata
import sys

from packaging.requirements import Requirement

for line in importlib.metadata.requires(sys.argv[1]) or ():
    requirement = Requirement(line)
    here = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if here and requirement.name not in sys.argv[2:]:
        requirement.marker = None
        print(requirement)
