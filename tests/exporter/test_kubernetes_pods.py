"""Pods by name, and the cards that the kubelet gave them; the kubelet is a real gRPC server."""

from __future__ import annotations

import hashlib
import socket
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from tests.exporter.kubelet_servers import Kubelet, claim, devices, field, pod, varint
from tests.exporter.mirrors import ProcMirror
from tests.exporter.nodes import Children, ManualClock, eventually

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.exporter import grpc_calls
from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.devices import DeviceSnapshot, Gpu, GpuProcess, MigInstance, ProcessKind
from gpuwarden.exporter.inquiries import Inquiry
from gpuwarden.exporter.kubelets import KubeletQuestions
from gpuwarden.exporter.kubernetes_pods import FRESH_SECONDS
from gpuwarden.platforms.kubelet import LIST_METHOD, Pod, PodDevices, decode_list, decode_log_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.exporter.jobs import NodeSnapshot

UID, OTHER = (f"0b9e4f0c-1111-2222-3333-44445555666{n}" for n in (6, 7))
GPU = "GPU-0b9e4f0c-aaaa-bbbb-cccc-0000000000"
MIG = "MIG-0b9e4f0c-aaaa-bbbb-cccc-000000000007"
CONTAINER = "ab" * 32


def noise(size: int) -> bytes:
    """Bytes without meaning, the same in every process: tests are named by them."""
    return hashlib.shake_256(b"noise").digest(size)


@pytest.fixture
def kubelet() -> Iterator[Kubelet]:
    """A node's kubelet."""
    # A socket's path has room for a hundred characters: pytest's folders are longer.
    with tempfile.TemporaryDirectory(prefix="kubelet") as folder:
        started = Kubelet(Path(folder))
        yield started
        started.stop()


@pytest.fixture
def questions(kubelet: Kubelet) -> KubeletQuestions:
    """What the exporter asks it with."""
    return KubeletQuestions(kubelet.socket, kubelet.logs, (kubelet.cgroups,))


class TestCall:
    """One call of gRPC."""

    @pytest.mark.parametrize("size", [0, 5, 6 * 2**20])
    def test_an_answer(self, kubelet: Kubelet, size: int) -> None:
        """An answer of any size that a node may have, beyond gRPC's own 4 MiB too."""
        kubelet.answer = noise(size)
        assert grpc_calls.call(kubelet.socket, LIST_METHOD) == kubelet.answer

    def test_an_endless_answer(self, kubelet: Kubelet) -> None:
        """What no node has is not taken."""
        kubelet.answer = bytes(grpc_calls.MAX_ANSWER_BYTES + 1)
        with pytest.raises(ServiceUnavailable, match="more than"):
            grpc_calls.call(kubelet.socket, LIST_METHOD)

    @pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE])
    def test_a_refusal(self, kubelet: Kubelet, code: grpc.StatusCode) -> None:
        """What the kubelet says is told."""
        kubelet.code = code
        with pytest.raises(ServiceUnavailable, match=f"status {code.value[0]} the feature gate"):
            grpc_calls.call(kubelet.socket, LIST_METHOD)

    def test_another_method(self, kubelet: Kubelet) -> None:
        """An old kubelet has no v1: that is said, and nothing is made up."""
        with pytest.raises(ServiceUnavailable, match="status 12"):
            grpc_calls.call(kubelet.socket, "/v2.PodResourcesLister/List")

    def test_one_that_hangs(self, kubelet: Kubelet) -> None:
        """A kubelet that takes a call and does not answer costs a moment."""
        kubelet.go_on.clear()
        with pytest.raises(ServiceUnavailable):
            grpc_calls.call(kubelet.socket, LIST_METHOD, seconds=0.3)

    def test_nobody(self, tmp_path: Path) -> None:
        """A socket that is not there is no answer."""
        with pytest.raises(ServiceUnavailable, match="no answer at"):
            grpc_calls.call(tmp_path / "none.sock", LIST_METHOD)

    @pytest.mark.parametrize(
        "said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 200, noise(5000)]
    )
    def test_another_protocol(self, said: bytes) -> None:
        """Whatever another server says, it is no answer."""
        with (
            tempfile.TemporaryDirectory(prefix="kubelet") as folder,
            socket.socket(socket.AF_UNIX) as server,
        ):
            path = Path(folder) / "x.sock"
            server.bind(str(path))
            server.listen()

            def serve() -> None:
                connection, _ = server.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(said)

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(ServiceUnavailable):
                grpc_calls.call(path, LIST_METHOD, seconds=5)
            thread.join()


class TestAnswers:
    """What a node tells of its pods."""

    def test_all_of_it(self, kubelet: Kubelet, questions: KubeletQuestions) -> None:
        """Names by the folders of logs, who lives by cgroups, devices by the kubelet."""
        kubelet.has("lab", "train-0", UID)
        kubelet.has("lab", "done", OTHER, alive=False)
        (kubelet.logs / "something else").mkdir()
        kubelet.says(
            [
                pod("lab", "train-0", devices("nvidia.com/gpu", f"{GPU}00", f"{GPU}01"), b""),
                pod("kube-system", "proxy", b""),
            ]
        )
        view = questions.ask()
        assert view.pods == {UID: Pod("lab", "train-0"), OTHER: Pod("lab", "done")}
        assert view.alive == {UID}
        given = PodDevices(Pod("lab", "train-0"), "c0", "nvidia.com/gpu", (f"{GPU}00", f"{GPU}01"))
        assert view.devices == (given,)

    def test_without_a_socket(self, kubelet: Kubelet) -> None:
        """Where only logs can be seen, pods have their names."""
        kubelet.has("lab", "train-0", UID)
        questions = KubeletQuestions(Path("/none.sock"), kubelet.logs, (Path("/none"),))
        view = questions.ask()
        assert (view.pods, view.alive, view.devices) == ({UID: Pod("lab", "train-0")}, None, ())

    @pytest.mark.parametrize(
        ("folder", "told"),
        [
            (f"lab_train-0_{UID}", (UID, Pod("lab", "train-0"))),
            (f"kube-system_etcd.node1_{'ab' * 16}", ("ab" * 16, Pod("kube-system", "etcd.node1"))),
            (f"lab_train_0_{UID}", None),
            (f"Lab_train-0_{UID}", None),
            (f"lab_{UID}", None),
            ("lab_train-0_1234", None),
            ("lost+found", None),
        ],
    )
    def test_folders(self, folder: str, told: tuple[str, Pod] | None) -> None:
        """Folders that are not named as the kubelet names them are somebody else's."""
        assert decode_log_folder(folder) == told

    @pytest.mark.parametrize(
        "content",
        [
            b"\x0a",
            b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
            b"\x0a\x05ab",
            b"\x0b\x01",
            field(1, field(1, b"\xff\xfe")),
            varint(1 << 3 | 2) + b"\x80" * 11,
            noise(64) + b"\x0b",
        ],
    )
    def test_torn_answers(self, content: bytes) -> None:
        """An answer that ends early or is none is refused as a whole."""
        with pytest.raises(ServiceUnavailable):
            decode_list(content)


class Node:
    """A node of Kubernetes with two cards, one of them with an instance."""

    def __init__(self, folder: Path, clock: ManualClock, questions: KubeletQuestions) -> None:
        self.clock = clock
        self.proc = ProcMirror(folder / "proc")
        self.inquiry = Inquiry("kubelet", questions.ask, every=0.01, gap=0.01, clock=clock)
        self.attribution = Attribution(
            folder / "jobs", clock=clock, proc=self.proc.folder, kubelet=self.inquiry
        )
        self.on_card: list[int] = []

    def observe(self) -> NodeSnapshot:
        """Read the node once."""
        listed = tuple(GpuProcess(pid, ProcessKind.COMPUTE, 1000, 0.5) for pid in self.on_card)
        mig = (MigInstance(MIG, 1, 0),)
        gpus = (
            Gpu(0, f"{GPU}00", "x", minor=1, utilization_ratio=0.5, processes=listed),
            Gpu(1, f"{GPU}01", "x", minor=0, utilization_ratio=0.0, processes=()),
            Gpu(2, f"{GPU}02", "x", minor=2, mig_enabled=True, processes=(), instances=mig),
        )
        return self.attribution.observe(DeviceSnapshot(0.0, "550", simulated=True, gpus=gpus))

    def answered(self) -> NodeSnapshot:
        """A snapshot after an answer to a question that was asked after now."""
        self.observe()
        begun = self.inquiry.begun
        eventually(
            lambda: self.inquiry.told, until=lambda told: told is not None and told.number > begun
        )
        return self.observe()


@pytest.fixture
def node(tmp_path: Path, clock: ManualClock, questions: KubeletQuestions) -> Iterator[Node]:
    """A node whose kubelet is the test's."""
    made = Node(tmp_path, clock, questions)
    yield made
    made.attribution.close()


def _held(snapshot: NodeSnapshot) -> dict[str, list[tuple[str, float | None]]]:
    return {
        job.job_id: [(item.uuid, item.utilization_ratio) for item in job.holdings]
        for job in snapshot.jobs
    }


class TestNode:
    """Jobs of Kubernetes on a node."""

    def test_a_pod_with_a_process(self, node: Node, kubelet: Kubelet, children: Children) -> None:
        """A process's pod has its names under labels that clash with no target's."""
        kubelet.has("lab", "train-0", UID)
        kubelet.says([pod("lab", "train-0", devices("nvidia.com/gpu", f"{GPU}00", f"{GPU}01"))])
        child = children.start()
        uid = UID.replace("-", "_")
        node.proc.put(
            [child.pid],
            f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid}.slice/"
            f"cri-containerd-{CONTAINER}.scope",
        )
        node.on_card = [child.pid]
        snapshot = node.answered()
        assert _held(snapshot) == {f"pod-{UID}": [(f"{GPU}00", 0.5), (f"{GPU}01", 0.0)]}
        facts = snapshot.jobs[0].platform
        assert (facts.platform, facts.number) == ("kubernetes", UID)
        assert (facts.namespace, facts.name) == ("lab", "train-0")
        assert facts.containers == (CONTAINER,)

    @pytest.mark.parametrize(
        ("device", "uuid"),
        [
            (f"{GPU}01", f"{GPU}01"),
            (f"{GPU}01::3", f"{GPU}01"),
            (MIG, MIG),
            ("nvidia0", f"{GPU}01"),
            ("1", f"{GPU}01"),
        ],
    )
    def test_what_plugins_call_a_card(
        self, node: Node, kubelet: Kubelet, *, device: str, uuid: str
    ) -> None:
        """By UUID, as a share of one, by the number of the device file, or by NVML's index."""
        kubelet.has("lab", "train-0", UID)
        kubelet.says([pod("lab", "train-0", devices("nvidia.com/gpu", device))])
        snapshot = node.answered()
        assert _held(snapshot) == {f"pod-{UID}": [(uuid, 0.0)]}
        (job,) = snapshot.jobs
        assert (job.user, job.source, job.start_time, job.root) == ("", "pod", None, None)

    def test_a_claim(self, node: Node, kubelet: Kubelet) -> None:
        """A card that was given by a claim."""
        kubelet.has("lab", "train-0", UID)
        kubelet.says([pod("lab", "train-0", claim("gpu.nvidia.com", "gpu-0"))])
        assert _held(node.answered()) == {f"pod-{UID}": [(f"{GPU}01", 0.0)]}

    @pytest.mark.parametrize(
        ("resource", "device", "dropped"),
        [
            ("nvidia.com/gpu", f"{GPU}99", {"kubernetes_device": 1}),
            ("nvidia.com/gpu", "nvidia2", {"kubernetes_device": 1}),
            ("nvidia.com/mig-1g.5gb", "no uuid", {"kubernetes_device": 1}),
            ("intel.com/qat", "qat0", {}),
            ("cpu", "1", {}),
        ],
    )
    def test_what_is_no_card(
        self,
        node: Node,
        kubelet: Kubelet,
        *,
        resource: str,
        device: str,
        dropped: dict[str, int],
    ) -> None:
        """A device that is not known is counted, one of another kind is none of ours."""
        kubelet.has("lab", "train-0", UID)
        kubelet.says([pod("lab", "train-0", devices(resource, device))])
        snapshot = node.answered()
        assert (snapshot.jobs, snapshot.dropped) == ((), dropped)

    def test_two_pods_of_one_name(self, node: Node, kubelet: Kubelet) -> None:
        """Of a pod and the one before it under the same name, the one that lives has the card."""
        kubelet.has("lab", "train-0", UID)
        kubelet.has("lab", "train-0", OTHER, alive=False)
        kubelet.says([pod("lab", "train-0", devices("nvidia.com/gpu", f"{GPU}01"))])
        assert list(_held(node.answered())) == [f"pod-{UID}"]
        kubelet.cgroup(OTHER).mkdir(parents=True)
        snapshot = node.answered()
        assert (snapshot.jobs, snapshot.dropped) == ((), {"kubernetes_pod": 1})

    def test_a_pod_that_has_ended(self, node: Node, kubelet: Kubelet) -> None:
        """Kubelets list pods that have ended: without a cgroup a pod holds nothing."""
        kubelet.has("lab", "train-0", UID)
        kubelet.has("lab", "other", OTHER)
        kubelet.says([pod("lab", "train-0", devices("nvidia.com/gpu", f"{GPU}01"))])
        assert list(_held(node.answered())) == [f"pod-{UID}"]
        kubelet.cgroup(UID).rmdir()
        assert node.answered().jobs == ()

    def test_a_pod_that_has_ended_seen_from_a_pod(
        self, node: Node, kubelet: Kubelet, children: Children
    ) -> None:
        """Where no cgroups of pods are seen, one without a process has ended: it holds nothing."""
        kubelet.has("lab", "train-0", UID, alive=False)
        kubelet.has("lab", "done", OTHER, alive=False)
        kubelet.says(
            [
                pod("lab", "train-0", devices("nvidia.com/gpu", f"{GPU}01")),
                pod("lab", "done", devices("nvidia.com/gpu", f"{GPU}01")),
            ]
        )
        pause = children.start()
        node.proc.put([pause.pid], f"/../../kubepods/burstable/pod{UID}/{CONTAINER}")
        snapshot = node.answered()
        assert _held(snapshot) == {f"pod-{UID}": [(f"{GPU}01", 0.0)]}
        assert snapshot.dropped == {"kubernetes_pod": 1}

    def test_a_kubelet_that_is_down(self, node: Node, kubelet: Kubelet, children: Children) -> None:
        """A pod is its uid, and its log's folder tells its name: that needs no kubelet."""
        kubelet.code = grpc.StatusCode.UNAVAILABLE
        kubelet.has("lab", "train-0", UID)
        child = children.start()
        node.proc.put([child.pid], f"/kubepods/burstable/pod{UID}/{CONTAINER}")
        node.on_card = [child.pid]
        snapshot = node.answered()
        assert list(_held(snapshot)) == [f"pod-{UID}"]
        assert snapshot.jobs[0].platform.name == "train-0"
        assert (snapshot.impaired, snapshot.failed) == ({"kubernetes"}, frozenset())
        kubelet.code = None
        assert node.answered().impaired == frozenset()

    def test_logs_that_may_not_be_listed(self, node: Node, kubelet: Kubelet) -> None:
        """Where the node tells nothing at all, that is said."""
        kubelet.logs.rmdir()
        kubelet.logs.write_text("a file")
        node.observe()
        eventually(lambda: node.inquiry.problem)
        assert node.observe().impaired == {"kubernetes"}

    def test_an_old_answer(self, node: Node, kubelet: Kubelet) -> None:
        """Who had a card a while ago need not have it now."""
        kubelet.has("lab", "train-0", UID)
        kubelet.says([pod("lab", "train-0", devices("nvidia.com/gpu", f"{GPU}01"))])
        assert list(_held(node.answered())) == [f"pod-{UID}"]
        kubelet.logs.rename(kubelet.logs.with_name("gone"))
        kubelet.logs.write_text("a file")
        eventually(lambda: node.inquiry.problem)
        node.clock.advance(FRESH_SECONDS + 1)
        assert node.observe().jobs == ()
