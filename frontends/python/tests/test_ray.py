"""Ray: workers of one node share one server, which may be killed; the cluster's nodes are faked on this machine."""

import os
import signal
import sys

import pytest
from conftest import DATA, engine, processes_of, wait_until

# On a busy machine Ray's own processes take longer to answer than it waits.
os.environ.setdefault("RAY_gcs_rpc_server_connect_timeout_s", "90")
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")

# `cargo xtask nightly python-heavy` installs it.
ray, cluster_utils = engine("ray", module=True), engine("ray.cluster_utils", module=True)
# Workers cannot import this module: what they run of it goes to them whole.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
NODES = 2
PARTS = 4


def read_part(url):
    from quinion import ray as quinion_ray

    client = quinion_ray.client()
    with client.open(url) as file:
        return file.read(), client.name


@pytest.fixture
def cluster(tmp_path, web):
    """Nodes with a server each; its name, but for the node's number."""
    from quinion import ray as quinion_ray

    for n in range(PARTS):
        web.objects[f"part-{n}"] = DATA[n:]
    name = str(tmp_path / "{node_id:.8}" / "q.sock")  # a socket's path is short
    made = cluster_utils.Cluster()
    for _ in range(NODES):
        made.add_node(num_cpus=1, object_store_memory=80 << 20, include_dashboard=False)
    setup = quinion_ray.runtime_env(name, memory=64 << 20, stores={web.url: {}}, idle=60)
    ray.init(address=made.address, runtime_env=setup, log_to_driver=False)
    yield name
    ray.shutdown()
    made.shutdown()
    for node in tmp_path.iterdir():
        for process in processes_of(str(node / "q.sock")):
            os.kill(process, signal.SIGKILL)


def on_each_node(function, *arguments):
    """What a task on each node returns, by the nodes' ids."""
    task = ray.remote(num_cpus=1)(function)
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    asked = {n: task.options(scheduling_strategy=affinity(n, soft=False)).remote(*arguments) for n in nodes}
    return {node: ray.get(answer, timeout=120) for node, answer in asked.items()}


def test_each_node_has_one_server_and_fetches_each_byte_once(cluster, web):
    for _epoch in range(2):
        for n in range(PARTS):
            found = on_each_node(read_part, f"{web.url}/part-{n}")
            assert len(found) == NODES
            for node, (data, name) in found.items():
                assert data == DATA[n:] and name == cluster.format(node_id=node)
    # Each node has fetched each byte once, in whichever round.
    assert sum(web.sent.values()) == NODES * sum(len(DATA) - n for n in range(PARTS))
    for node in found:
        assert len(processes_of(cluster.format(node_id=node))) == 1


def test_workers_go_on_after_the_server_of_a_node_was_killed(cluster, web):
    url = f"{web.url}/part-0"
    found = on_each_node(read_part, url)
    for node in found:
        name = cluster.format(node_id=node)
        wait_until(lambda name=name: len(processes_of(name)) == 1)
        (killed,) = processes_of(name)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda name=name: not processes_of(name))
    # Only workers may start others.
    again = on_each_node(read_part, url)
    assert {data for data, _ in again.values()} == {DATA} and again.keys() == found.keys()
    for node in found:
        wait_until(lambda name=cluster.format(node_id=node): len(processes_of(name)) == 1)


def test_the_hint_names_the_node_that_has_the_object(cluster, web):
    from quinion import ray as quinion_ray

    url = f"{web.url}/part-1"
    on_each_node(read_part, f"{web.url}/part-0")  # both have a server now
    assert set(quinion_ray.residency(url).values()) == {0} and quinion_ray.affinity(url) == "DEFAULT"
    node = ray.nodes()[0]["NodeID"]
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    task = ray.remote(num_cpus=1)(read_part).options(scheduling_strategy=affinity(node, soft=False))
    ray.get(task.remote(url), timeout=120)
    cached = quinion_ray.residency(url)
    assert cached.pop(node) == len(DATA) - 1 and set(cached.values()) == {0}
    assert quinion_ray.affinity(url).node_id == node
