"""What the processes of a run did when: read from their rings of spans, drawn, and written for other programs."""
