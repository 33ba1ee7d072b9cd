"""A Ray of several nodes on this machine, in a process of its own that takes orders by its standard
input: `add` a node, `kill N` (ungracefully), `end`. It says each node's number and the client's
port."""

import os
import socket
import sys

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_AUTH_MODE", "disabled")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main() -> None:
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 80 << 20}
    port = free_port()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "num_gpus": 0,
            "include_dashboard": False,
            "ray_client_server_port": port,
            **memory,
        },
    )
    nodes = []
    print(f"port {port}", flush=True)
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        if word == "add":
            nodes.append(cluster.add_node(num_cpus=1, num_gpus=0, **memory))
            print(f"node {len(nodes) - 1}", flush=True)
        elif word == "kill":
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
            print("killed", flush=True)
        else:
            break
    cluster.shutdown()
    print("ended", flush=True)


if __name__ == "__main__":
    main()
