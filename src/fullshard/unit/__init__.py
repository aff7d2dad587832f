"""What is sharded: a unit, its parameters, their all-gather and reduce-scatter."""
