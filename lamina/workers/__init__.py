"""The processes of the two pools and the messages between them."""
