"""A whole RL step on a trace: rollouts write routing, learner ranks replay their part of it, weights go back."""
