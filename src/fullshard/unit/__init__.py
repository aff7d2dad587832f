"""WHAT: one unit, its parameters, its slab, its gradients."""
