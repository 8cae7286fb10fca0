"""The hosts of a cluster: the cluster's file, the placement of workers, and Ray."""
