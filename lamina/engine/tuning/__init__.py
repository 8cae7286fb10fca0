"""How many batches take turns: measured laws of the pools, and the choice by them."""
