"""The files of examples/cluster, as far as they can be checked without a cluster: none of them has run on one."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolltree.engine.app.cli import main
from rolltree.engine.app.config import load_config

from .support.tiny import ROOT

CLUSTER = ROOT / "examples" / "cluster"
TOML = CLUSTER / "run.toml"
SCRIPTS = ["ray_job.sh", "slurm.sbatch"]

RAY_JOB = {
    "activeDeadlineSeconds", "backoffLimit", "rayClusterSpec", "submitterPodTemplate", "metadata", "clusterSelector",
    "submitterConfig", "managedBy", "deletionStrategy", "entrypoint", "runtimeEnvYAML", "jobId", "submissionMode",
    "entrypointResources", "entrypointNumCpus", "entrypointNumGpus", "ttlSecondsAfterFinished",
    "shutdownAfterJobFinishes", "suspend",
}  # fmt: skip
RAY_CLUSTER = {
    "suspend", "managedBy", "autoscalerOptions", "headServiceAnnotations", "enableInTreeAutoscaling",
    "gcsFaultToleranceOptions", "headGroupSpec", "rayVersion", "workerGroupSpecs", "authOptions",
}  # fmt: skip
HEAD = {"template", "headService", "enableIngress", "rayStartParams", "serviceType"}
WORKERS = {
    "suspend", "groupName", "replicas", "minReplicas", "maxReplicas", "idleTimeoutSeconds", "rayStartParams",
    "template", "scaleStrategy", "numOfHosts",
}  # fmt: skip
"""Fields of ray.io/v1 by KubeRay's API reference (docs.ray.io, cluster/kubernetes/references/api)."""


@pytest.fixture
def no_ray_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "ray" else find(name))


@pytest.mark.check
def test_the_toml_of_all_examples_can_be_planned(
    no_ray_needed: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(TOML), "--dry-run", f"--output_dir={tmp_path}"]) == 0
    told = capsys.readouterr().out
    assert "engines            7 processes of Ray on auto" in told
    assert "loop               staleness 1" in told


def test_the_same_toml_is_a_run_of_one_process(tmp_path: Path) -> None:
    """Only the keys of other processes change."""
    changed = tmp_path / "one.toml"
    document = TOML.read_text()
    changed.write_text(document[: document.index("[placement]")].replace("engines = 7", "engines = 0"))
    one, many = load_config(changed).model_dump(), load_config(TOML).model_dump()
    assert [key for key in many if many[key] != one[key]] == ["rollout", "placement"]


def test_a_mistake_in_the_toml_would_be_found(no_ray_needed: None, tmp_path: Path) -> None:
    """The negative."""
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(TOML.read_text().replace("per_engine", "per_engines"))
    assert main(["train", str(wrong), "--dry-run"]) == 2


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_valid_and_use_the_toml(name: str) -> None:
    script = CLUSTER / name
    assert subprocess.run(["bash", "-n", script], capture_output=True, check=False).returncode == 0
    assert "rolltree train run.toml" in script.read_text()
    assert "RAY_AUTH_MODE" in script.read_text()
    if (shellcheck := shutil.which("shellcheck")) is not None:
        found = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout


def stub(directory: Path, name: str, body: str) -> None:
    file = directory / name
    file.write_text(f"#!/usr/bin/env bash\n{body}\n")
    file.chmod(0o755)


def test_the_ray_job_starts_the_command_in_the_shared_directory(tmp_path: Path) -> None:
    """`ray` is a stand-in that does with the words after ``--`` as `ray job submit`: joins them for a shell."""
    shared, bin_ = tmp_path / "a shared folder", tmp_path / "bin"
    shared.mkdir()
    bin_.mkdir()
    stub(bin_, "ray", 'printf "%s\\n" "$@" > "$SEEN"; while [ "$1" != -- ]; do shift; done; shift; sh -c "$*"')
    stub(bin_, "rolltree", 'pwd > "$SEEN.rolltree"; printf "%s\\n" "$@" >> "$SEEN.rolltree"')
    environment = os.environ | {
        "PATH": f"{bin_}:{os.environ['PATH']}", "SEEN": str(tmp_path / "seen"), "SHARED": str(shared),
        "RAY_API_SERVER_ADDRESS": "http://head:8265",
    }  # fmt: skip
    script = [str(CLUSTER / "ray_job.sh"), "--name", "two words"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = (tmp_path / "seen").read_text().splitlines()
    assert seen[:2] == ["job", "submit"]
    assert seen[seen.index("--address") + 1] == "http://head:8265"
    assert seen[seen.index("--entrypoint-num-gpus") + 1] == "1"
    assert (tmp_path / "seen.rolltree").read_text().splitlines() == [
        str(shared), "train", "run.toml", "--name", "two words"
    ]  # fmt: skip
    assert (shared / "run.toml").read_text() == TOML.read_text()
    del environment["SHARED"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "give a directory that all nodes share" in done.stderr


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_slurm_job_starts_a_head_then_the_workers_then_the_run(nodes: int, tmp_path: Path) -> None:
    """Stand-ins for Slurm's commands note their arguments; each starts its command here."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    names = "\\n".join(f"node{i}" for i in range(nodes))
    stub(bin_, "scontrol", f'printf "{names}\\n"')
    stub(bin_, "getent", 'echo "10.0.0.1 STREAM $2"')
    stub(bin_, "sleep", "exec /bin/sleep 0.1")
    stub(bin_, "srun", 'echo "srun $*" >> "$SEEN"; while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')
    stub(
        bin_, "ray",
        'echo "ray $* | devices ${CUDA_VISIBLE_DEVICES-all} token ${#RAY_AUTH_TOKEN} address ${RAY_ADDRESS-none}" '
        '>> "$SEEN"\n[ "$1" = status ] || exec tail -f "$0"\n[ "$(grep -c "^ray start" "$SEEN")" = "$STARTS" ]',
    )  # fmt: skip
    stub(bin_, "rolltree", 'echo "rolltree $* | devices $CUDA_VISIBLE_DEVICES address $RAY_ADDRESS" >> "$SEEN"')
    environment = os.environ | {
        "PATH": f"{bin_}:{os.environ['PATH']}", "SEEN": str(tmp_path / "seen"), "SLURM_JOB_NODELIST": "node[0-9]",
        "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "16",
        "STARTS": str(1 + (nodes > 1)),
    }  # fmt: skip
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    script = ["bash", str(CLUSTER / "slurm.sbatch"), "--resume"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    seen = (tmp_path / "seen").read_text().splitlines()
    started = [line for line in seen if line.startswith("ray start")]
    (head,) = [line for line in started if "--head" in line]
    assert "--node-ip-address=10.0.0.1 --port=6379 --num-gpus=3 --num-cpus=16" in head
    assert head.endswith("devices 1,2,3 token 64 address none")
    workers = [line for line in started if "--head" not in line]
    assert len(workers) == (nodes > 1)  # one srun for all of them
    for line in workers:
        assert "--address=10.0.0.1:6379 --num-gpus=4" in line
        assert "token 64" in line
        assert any(f"--nodes={nodes - 1} --ntasks={nodes - 1} --exclude=node0" in one for one in seen)
    assert seen[-1] == "rolltree train run.toml --resume | devices 0 address 10.0.0.1:6379"


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CLUSTER / "kuberay.yaml").read_text()))


def test_the_ray_job_of_kuberay_has_the_fields_of_the_api() -> None:
    job, claim = documents()
    assert (job["apiVersion"], job["kind"], claim["kind"]) == ("ray.io/v1", "RayJob", "PersistentVolumeClaim")
    spec = job["spec"]
    cluster = spec["rayClusterSpec"]
    assert set(spec) <= RAY_JOB
    assert spec["submissionMode"] in ("K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode")
    assert set(cluster) <= RAY_CLUSTER
    assert cluster["authOptions"] == {"mode": "token"}
    assert set(cluster["headGroupSpec"]) <= HEAD
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    for group in cluster["workerGroupSpecs"]:
        assert set(group) <= WORKERS
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", group["groupName"])
    assert "cd /shared/rolltree && exec rolltree train run.toml" in spec["entrypoint"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_every_cluster_has_room_for_the_run() -> None:
    """Seven engines and the process that trains, on the GPUs and cores that each file asks for."""
    document = tomllib.loads(TOML.read_text())
    each, engines = document["placement"]["per_engine"], document["rollout"]["engines"]
    slurm = (CLUSTER / "slurm.sbatch").read_text()
    limits = documents()[0]["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    kuberay = limits["resources"]["limits"]
    rooms = [
        (int(re.findall(r"--gpus-per-node=(\d+)", slurm)[0]), int(re.findall(r"--cpus-per-task=(\d+)", slurm)[0])),
        (int(kuberay["nvidia.com/gpu"]), int(kuberay["cpu"])),
    ]
    for gpus, cpus in rooms:
        assert gpus == engines * each["GPU"] + 1
        assert cpus > engines * each["CPU"]


def test_the_image_has_the_ray_of_the_cluster_and_of_the_tests() -> None:
    lines = (CLUSTER / "Containerfile").read_text()
    (installed,) = re.findall(r'"ray\[default\]==([\d.]+)"', lines)
    assert documents()[0]["spec"]["rayClusterSpec"]["rayVersion"] == installed
    makefile = (ROOT / "Makefile").read_text()
    assert f"ray=={installed} " in makefile
    assert re.findall(r'"(torch==[\d.]+)"', lines) == re.findall(r"^TORCH \?= (\S+)$", makefile, re.MULTILINE)
    extras = set(re.findall(r'"\.\[([\w,]+)\]"', lines)[0].split(","))
    assert extras <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
