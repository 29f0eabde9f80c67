"""What puts a peer together: its node and what it answers, its session, the thread they run on."""
