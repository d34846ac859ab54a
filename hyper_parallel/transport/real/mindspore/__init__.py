"""MindSpore's real ranks: HCCL, and its rehearsals on CPU."""
