"""What answers each endpoint: functions of the service and of what it was asked."""
