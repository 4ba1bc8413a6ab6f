# Wrong values beside one another. See refused.tftest.hcl.

run "a_name_too_long_for_express" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name                 = "a-name-of-fifty-one-characters-0123456789-012345678"
    storage              = "express"
    availability_zone_id = "use1-az4"
  }

  expect_failures = [var.name]
}

run "an_unknown_storage" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name    = "cache"
    storage = "glacier"
  }

  expect_failures = [var.storage]
}

run "a_storage_in_capitals" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name    = "cache"
    storage = "EXPRESS"
  }

  expect_failures = [var.storage]
}

run "express_without_a_zone" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name    = "cache"
    storage = "express"
  }

  expect_failures = [var.availability_zone_id]
}

run "a_zone_without_express" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name                 = "cache"
    availability_zone_id = "use1-az4"
  }

  expect_failures = [var.availability_zone_id]
}

run "a_zone_by_its_name" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name                 = "cache"
    storage              = "express"
    availability_zone_id = "us-east-1a"
  }

  expect_failures = [var.availability_zone_id]
}

run "a_zone_with_more_behind_it" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name                 = "cache"
    storage              = "express"
    availability_zone_id = "use1-az4-1"
  }

  expect_failures = [var.availability_zone_id]
}

run "a_zone_with_more_before_it" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name                 = "cache"
    storage              = "express"
    availability_zone_id = "a--use1-az4"
  }

  expect_failures = [var.availability_zone_id]
}

run "buckets_that_an_express_endpoint_cannot_reach" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name                 = "cache"
    storage              = "express"
    availability_zone_id = "use1-az4"
    gateway_endpoint     = { vpc_id = "vpc-1", route_table_ids = ["rtb-1"], extra_bucket_names = ["models"] }
  }

  expect_failures = [var.gateway_endpoint]
}

run "actions_without_an_alarm" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name            = "cache"
    request_metrics = false
    alarm_actions   = ["arn:aws:sns:eu-west-1:111122223333:pager"]
  }

  expect_failures = [var.alarm_actions]
}

run "actions_without_an_alarm_in_express" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name                 = "cache"
    storage              = "express"
    availability_zone_id = "use1-az4"
    alarm_actions        = ["arn:aws:sns:eu-west-1:111122223333:pager"]
  }

  expect_failures = [var.alarm_actions]
}
