"""SIE-Stream: a Scalable Inference Engine as an event-driven pipeline on Apache Kafka."""

__version__ = "0.1.0"
