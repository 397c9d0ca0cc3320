"""The demo: rollouts of a small MoE model, whose routing learner ranks read in two ways."""
