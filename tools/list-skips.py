#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/list-skips.py PRESET FILE: print each skip of a run of CTest and its reason, from the JUnit file of that run.

The file is the run's own. Testing/Temporary/LastTest.log is of the last ctest in that folder, whoever started it.
"""
import re
import sys
import xml.etree.ElementTree as ET

REASON = re.compile(r"skipped( [a-z0-9_]+)?: ")


def reasons(output):
    """What the program said of its skips. cmocka names a test again at the end, which gives no further reason."""
    told, explained = [], False
    for line in output.splitlines():
        if line.startswith("[ RUN "):
            explained = False
        elif line.startswith("[====="):
            explained = True
        elif REASON.match(line):
            told.append(line)
            explained = True
        elif re.match(r"\[  SKIPPED \] [a-z]", line):
            if not explained:
                told.append(f"{line.split()[-1]} was skipped, it does not say why")
            explained = True
    return told


def main():
    preset, path = sys.argv[1:]
    for case in ET.parse(path).getroot().iter("testcase"):
        told = reasons(case.findtext("system-out") or "")
        if not told and case.find("skipped") is not None:
            told = ["skipped, it does not say why"]
        for line in told:
            print(f"{preset}: {case.get('name')}: {line}")


main()
