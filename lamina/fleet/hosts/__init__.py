"""The hosts of a cluster: its file, who goes where, and Ray on them."""
