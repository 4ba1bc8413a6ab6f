# The real provider with keys that open nothing: it renders every policy while planning, offline.
provider "aws" {
  region                      = "eu-west-1"
  access_key                  = "fake"
  secret_key                  = "fake"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  skip_requesting_account_id  = true
}

override_data {
  target = data.aws_caller_identity.current
  values = { account_id = "111122223333" }
}

variables {
  name = "cache"
}

run "a_name_with_a_dot" {
  command = plan

  variables {
    name = "my.cache"
  }

  expect_failures = [var.name]
}

run "a_reserved_end_of_a_name" {
  command = plan

  variables {
    name = "cache--x-s3"
  }

  expect_failures = [var.name]
}

run "a_reserved_start_of_a_name" {
  command = plan

  variables {
    name = "xn--cache"
  }

  expect_failures = [var.name]
}

run "a_name_too_long_for_express" {
  command = plan

  variables {
    name                 = "a-name-of-fifty-one-characters-0123456789-012345678"
    storage              = "express"
    availability_zone_id = "use1-az4"
  }

  expect_failures = [var.name]
}

run "an_unknown_storage" {
  command = plan

  variables {
    storage = "glacier"
  }

  expect_failures = [var.storage]
}

run "express_without_a_zone" {
  command = plan

  variables {
    storage = "express"
  }

  expect_failures = [var.availability_zone_id]
}

run "a_zone_without_express" {
  command = plan

  variables {
    availability_zone_id = "use1-az4"
  }

  expect_failures = [var.availability_zone_id]
}

run "a_zone_by_its_name" {
  command = plan

  variables {
    storage              = "express"
    availability_zone_id = "us-east-1a"
  }

  expect_failures = [var.availability_zone_id]
}

run "a_wildcard_in_the_prefix" {
  command = plan

  variables {
    prefix = "s3kv*"
  }

  expect_failures = [var.prefix]
}

run "a_slash_at_the_end_of_the_prefix" {
  command = plan

  variables {
    prefix = "s3kv/"
  }

  expect_failures = [var.prefix]
}

run "no_day" {
  command = plan

  variables {
    expiration_days = 0
  }

  expect_failures = [var.expiration_days]
}

run "a_day_and_a_half" {
  command = plan

  variables {
    expiration_days = 1.5
  }

  expect_failures = [var.expiration_days]
}

run "a_key_by_its_alias" {
  command = plan

  variables {
    kms_key_arn = "arn:aws:kms:eu-west-1:111122223333:alias/cache"
  }

  expect_failures = [var.kms_key_arn]
}

run "an_unknown_access_by_pod_identity" {
  command = plan

  variables {
    pod_identities = { a = { cluster_name = "c", namespace = "n", service_account = "s", access = "admin" } }
  }

  expect_failures = [var.pod_identities]
}

run "a_role_with_too_long_a_name_by_pod_identity" {
  command = plan

  variables {
    pod_identities = { a-name-of-sixty-characters-0123456789-0123456789-0123456789 = { cluster_name = "c", namespace = "n", service_account = "s" } }
  }

  expect_failures = [var.pod_identities]
}

run "an_unknown_access_by_irsa" {
  command = plan

  variables {
    irsa = { a = { oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/o", namespace = "n", service_account = "s", access = "admin" } }
  }

  expect_failures = [var.irsa]
}

run "a_role_with_too_long_a_name_by_irsa" {
  command = plan

  variables {
    irsa = { a-name-of-sixty-characters-0123456789-0123456789-0123456789 = { oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/o", namespace = "n", service_account = "s" } }
  }

  expect_failures = [var.irsa]
}

run "an_issuer_for_its_arn" {
  command = plan

  variables {
    irsa = { a = { oidc_provider_arn = "https://oidc", namespace = "n", service_account = "s" } }
  }

  expect_failures = [var.irsa]
}

run "every_service_account" {
  command = plan

  variables {
    irsa = { a = { oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/o", namespace = "n", service_account = "*" } }
  }

  expect_failures = [var.irsa]
}

run "one_name_for_two_roles" {
  command = plan

  variables {
    irsa           = { a = { oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/o", namespace = "n", service_account = "s" } }
    pod_identities = { a = { cluster_name = "c", namespace = "n", service_account = "s" } }
  }

  expect_failures = [var.irsa]
}

run "a_boundary_that_is_no_policy" {
  command = plan

  variables {
    permissions_boundary_arn = "boundary"
  }

  expect_failures = [var.permissions_boundary_arn]
}

run "an_endpoint_in_no_route_table" {
  command = plan

  variables {
    gateway_endpoint = { vpc_id = "vpc-1", route_table_ids = [] }
  }

  expect_failures = [var.gateway_endpoint]
}

run "an_endpoint_to_every_bucket" {
  command = plan

  variables {
    gateway_endpoint = { vpc_id = "vpc-1", route_table_ids = ["rtb-1"], extra_bucket_names = ["*"] }
  }

  expect_failures = [var.gateway_endpoint]
}

run "buckets_that_an_express_endpoint_cannot_reach" {
  command = plan

  variables {
    storage              = "express"
    availability_zone_id = "use1-az4"
    gateway_endpoint     = { vpc_id = "vpc-1", route_table_ids = ["rtb-1"], extra_bucket_names = ["models"] }
  }

  expect_failures = [var.gateway_endpoint]
}

run "actions_without_an_alarm" {
  command = plan

  variables {
    request_metrics = false
    alarm_actions   = ["arn:aws:sns:eu-west-1:111122223333:pager"]
  }

  expect_failures = [var.alarm_actions]
}

run "an_action_that_is_no_arn" {
  command = plan

  variables {
    alarm_actions = ["pager"]
  }

  expect_failures = [var.alarm_actions]
}

run "no_errors_at_all" {
  command = plan

  variables {
    max_error_percent = 0
  }

  expect_failures = [var.max_error_percent]
}

run "no_latency_at_all" {
  command = plan

  variables {
    max_first_byte_latency_ms = 0
  }

  expect_failures = [var.max_first_byte_latency_ms]
}

run "no_budget_at_all" {
  command = plan

  variables {
    max_bucket_gib = 0
  }

  expect_failures = [var.max_bucket_gib]
}
