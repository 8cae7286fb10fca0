"""Parts of gpu_suite.py: each is imported when it runs, as one may lack what another has."""
