"""What trainers cannot know about a sharded optimizer, one module per trainer.

Importing a module needs the trainer's package; shardstep itself needs none of them.
"""
