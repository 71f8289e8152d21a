"""What a node does in the swarm: the duties of a backbone and of a worker, in the control process."""
