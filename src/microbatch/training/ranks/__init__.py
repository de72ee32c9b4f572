"""Steps shared by several processes: replicas, shards, and how ranks tell each other what happened."""
