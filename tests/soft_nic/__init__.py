"""The software NIC: a thread executes work requests of an mlx5 NIC, so that tests need no ConnectX.

Tests add its transports to those of ``--transport`` by LAMINA_TRANSPORTS.
"""

SCHEMES = {"nic-model": f"{__name__}.nic_model", "nic-model-proxy": f"{__name__}.nic_model_proxy"}  # scheme -> module
