"""The exactness algorithm of backends whose replicas see only their own rows."""
