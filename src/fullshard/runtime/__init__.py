"""WHEN: roots, phases, hooks, order, the end of backward, abort."""
