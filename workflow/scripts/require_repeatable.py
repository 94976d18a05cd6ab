"""Print a verdict on repeats, and refuse one that did not pass; the verdict itself stays where it is."""

import argparse
from pathlib import Path

from schemas.canonical import digest, read_model
from schemas.errors import Refusal, run
from schemas.policy import read_policy
from schemas.repeatability import Repeatability

from repeatability import verdict_lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verdict", type=Path, required=True)
    parser.add_argument("--policy", type=Path, required=True)
    arguments = parser.parse_args()
    verdict = read_model(Repeatability, arguments.verdict, "verdict")
    policy_sha256 = digest(read_policy(arguments.policy))
    if verdict.policy_sha256 != policy_sha256:
        expected = f"{policy_sha256} of {arguments.policy}"
        raise Refusal("policy_sha256", expected, verdict.policy_sha256, arguments.verdict)
    lines = list(verdict_lines(verdict))
    print(*lines, sep="\n")
    if verdict.outcome != "passed":
        found = next((line for line in lines[1:] if f": {verdict.outcome}" in line), verdict.outcome)
        raise Refusal("repeatability", "passed", found, arguments.verdict)


if __name__ == "__main__":
    run(main)
